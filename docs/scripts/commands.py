"""The table of all commands on their page: what `interp-run --help` lists, with where each is described."""

from __future__ import annotations

from interp_tasks.cli.command_dispatch import GROUPS, LISTED

MATRIX, MODULAR = "matrix-completion.md", "modular-arithmetic.md"
GENERALISATION, PRIMES, NEURONS = (
    f"{MODULAR}#{anchor}"
    for anchor in (
        "when-do-answers-generalise",
        "does-each-prime-have-a-circuit-of-its-own",
        "what-is-each-neuron",
    )
)
ALGORITHM, PLATEAU = (
    f"{MATRIX}#{anchor}"
    for anchor in ("is-it-a-known-algorithm", "where-is-the-plateau-and-when-does-it-end")
)
#: Command -> where it is described.
PAGES = {
    **{
        name: f"#{name}"
        for name in ("ablation", "heads", "transplant", "patch", "permute", "circuit", "lens")
    },
    **{name: f"#{name}" for name in ("probe", "fourier", "attention")},
    "matrix algorithm": ALGORITHM,
    "matrix baseline": ALGORITHM,
    "matrix copying": f"{MATRIX}#does-the-model-copy-what-it-is-given",
    "matrix decoding": f"{MATRIX}#other-forms-of-the-task",
    "matrix embeddings": f"{MATRIX}#how-are-embeddings-arranged",
    "matrix influence": f"{MATRIX}#which-observed-entries-move-which-hidden-ones",
    "matrix ood": f"{MATRIX}#what-about-other-matrices",
    "matrix order": f"{MATRIX}#what-moves-first",
    "modular detector": GENERALISATION,
    "modular generalisation": GENERALISATION,
    "modular gradients": NEURONS,
    "modular neurons": NEURONS,
    "modular prime-order": GENERALISATION,
    "modular primes": PRIMES,
    "modular progress": f"{MODULAR}#is-the-answer-made-of-fourier-components-and-since-when",
    "modular weights": f"{MODULAR}#how-are-embeddings-arranged",
    "runs curve": PLATEAU,
    "runs drops": PLATEAU,
    "runs llc": "results/learning-coefficient.md",
    "runs report": "report.md",
    "runs zoo": "shipped-models.md",
    "runs checkpoints": "checkpoints.md",
    "runs import": "checkpoints.md#weights-from-elsewhere",
    "runs search": "search.md",
    "tasks list": "training.md",
    "tasks data": f"{MODULAR}#what-does-guessing-get",
    "tasks cost": "training.md#what-a-run-costs",
    "train": "training.md",
    "grid": "grids.md",
    "reproduce": "reproduce.md",
}


def table() -> str:
    """Returns a row for each command, in the order of the help."""
    rows = ["| command | |", "|---|---|"]
    listed = {name: line for names in LISTED[""].values() for name, line in names.items()}
    for name, line in listed.items():
        for member, help in (LISTED[name]["Commands"] if name in GROUPS else {"": line}).items():
            path = f"{name} {member}".strip()
            shown = f"[`{path}`]({PAGES[path]})" if path in PAGES else f"`{path}`"
            rows.append(f"| {shown} | {help} |")
    return "\n".join(rows)
