"""The table of all commands on their page: what `interp-run --help` lists, with where each is described."""

from __future__ import annotations

from interp_tasks.cli.app import GROUPS, program

MATRIX, MODULAR = "matrix-completion", "modular-arithmetic"
#: Command -> where it is described.
PAGES = {
    **{
        name: f"#{name}"
        for name in ("ablation", "heads", "transplant", "patch", "permute", "circuit", "lens")
    },
    **{name: f"#{name}" for name in ("probe", "fourier", "attention")},
    "matrix algorithm": f"{MATRIX}/algorithms.md",
    "matrix baseline": f"{MATRIX}/baselines.md",
    "matrix copying": f"{MATRIX}/copying.md",
    "matrix decoding": f"{MATRIX}/autoregressive.md",
    "matrix embeddings": f"{MATRIX}/embeddings.md",
    "matrix influence": f"{MATRIX}/influence.md",
    "matrix ood": f"{MATRIX}/out-of-distribution.md",
    "matrix order": f"{MATRIX}/order.md",
    "modular detector": f"{MODULAR}/generalisation.md#the-remainders-as-a-prime-detector",
    "modular generalisation": f"{MODULAR}/generalisation.md",
    "modular gradients": f"{MODULAR}/neurons.md#gradients",
    "modular neurons": f"{MODULAR}/neurons.md",
    "modular prime-order": f"{MODULAR}/shared-circuits.md#what-the-order-of-generalisation-follows",
    "modular primes": f"{MODULAR}/shared-circuits.md",
    "modular progress": f"{MODULAR}/progress-measures.md",
    "modular weights": f"{MODULAR}/embeddings.md",
    "runs curve": f"{MATRIX}/training-dynamics.md",
    "runs drops": f"{MATRIX}/training-dynamics.md",
    "runs report": "report.md",
    "runs zoo": "shipped-models.md",
    "runs checkpoints": "checkpoints.md",
    "runs search": "search.md",
    "tasks list": "training.md",
    "tasks data": f"{MODULAR}/data.md",
    "tasks cost": "training.md#what-a-run-costs",
    "train": "training.md",
    "grid": "grids.md",
    "reproduce": "reproduce.md",
}


def table() -> str:
    """Returns a row for each command, in the order of the help."""
    rows = ["| command | |", "|---|---|"]
    for name, entry in program().entries.items():
        group = program().get_command(None, name) if name in GROUPS else None
        for member, one in group.entries.items() if group is not None else [("", entry)]:
            path = f"{name} {member}".strip()
            shown = f"[`{path}`]({PAGES[path]})" if path in PAGES else f"`{path}`"
            rows.append(f"| {shown} | {one.help} |")
    return "\n".join(rows)
