"""Numbers of some 350 calls on small random models, kept while the code beneath them is rewritten.

    python tests/recorded_calls.py --write     # before the first change
    python tests/recorded_calls.py             # after each: says which calls give other numbers

Models are in float64, and a call's numbers are its sum, its norm and its inner product with fixed random numbers, so
that what differs by more than 1e-8 was computed otherwise. A call that is refused is recorded as its exception's type.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformer_lens import HookedTransformer

from circuits import (
    CircuitsError,
    ablate,
    cache,
    circuit,
    edit,
    heads,
    lens,
    logit_difference,
    patch,
    patterns,
    permute,
    probe,
    run,
    sweep,
    transplant,
)
from tests.circuits import families

FILE = Path(__file__).parent / "data" / "recorded_calls.json"
TOLERANCE = 1e-8
WORDS, LENGTH, BATCH = 20, 6, 12
BASE: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 16,
    "n_ctx": 8,
    "d_head": 4,
    "n_heads": 4,
    "d_vocab": WORDS,
    "act_fn": "gelu",
    "normalization_type": "LN",
    "dtype": torch.float64,
    "init_weights": True,
    "seed": 0,
}
NATIVE: dict[str, dict[str, Any]] = {
    "layer-norm": {},
    "attention-only": {"attn_only": True, "normalization_type": None},
    "bidirectional": {"attention_dir": "bidirectional"},
    "parallel": {"parallel_attn_mlp": True},
    "rotary-grouped": {
        "positional_embedding_type": "rotary",
        "rotary_dim": 4,
        "n_key_value_heads": 2,
        "normalization_type": "RMS",
        "gated_mlp": True,
        "act_fn": "silu",
        "final_rms": True,
    },
}
BRIDGES = ("gpt2", "llama", "pythia", "gemma2")


def native(name: str, seed: int = 0) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = HookedTransformer({**BASE, **NATIVE[name], "seed": seed})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def calls(model: Any, other: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields names and calls; what they return holds numbers."""
    generator = torch.Generator().manual_seed(1)
    tokens, source = (torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))
    right, wrong = torch.arange(3, 3 + BATCH), torch.arange(5, 5 + BATCH)
    metric = logit_difference(right, wrong)
    ends = logit_difference(right, wrong, position=2)
    edits: dict[str, Any] = {
        "uniform all": ablate.uniform("all"),
        "uniform head": ablate.uniform([(0, 1)]),
        "uniform keys": ablate.uniform([(1, 2)], keys=[0, 1]),
        "uniform at": ablate.uniform("all", positions=[1, 3]),
        "mean pattern": ablate.mean_pattern([(0, 0), (1, 3)], reference=source),
        "zero heads": ablate.zero([(0, 1), (1, 0)]),
        "zero mlp": ablate.zero("blocks.0.hook_mlp_out"),
        "mean head": ablate.mean([(0, 2)], reference=source),
        "mean pooled": ablate.mean([(0, 2)], reference=source, over="batch,pos"),
        "resample": ablate.resample([(1, 1)], source=source, seed=3),
        "neurons": ablate.neurons(0, [0, 5]),
        "all but": ablate.all_but([(0, 0), (1, 1)], reference=source),
        "patch z": patch.activations("blocks.0.attn.hook_z", source=source),
        "patch head": patch.activations(
            "blocks.1.attn.hook_z", source=source, heads=[(1, 1)], positions=[-1]
        ),
        "patch stream": patch.activations("blocks.1.hook_resid_pre", source=source, positions=[2]),
        "patch pattern": patch.activations("blocks.1.attn.hook_pattern", source=source, heads=[(1, 0)]),
        "path to q": patch.path("0.1", "1.2.q", source=source),
        "path to mlp": patch.path("0.1", "mlp1", source=source),
        "path to output": patch.path("0.0", "output", source=source, through="mlps"),
        "transplant qkv": transplant.weights(other, ["qkv"]),
        "transplant o": transplant.weights(other, ["o"], layers=[1]),
        "permute": permute.positions(4),
        "steer": edit("blocks.0.hook_resid_post", lambda x: x + 0.5, positions=[1]),
    }
    for name, one in edits.items():
        yield f"run {name}", lambda one=one: run(model, tokens, one)
    yield "run two", lambda: run(model, tokens, edits["zero heads"], edits["patch stream"])
    yield "cache", lambda: cache(model, tokens, ["blocks.1.attn.hook_z"])["blocks.1.attn.hook_z"]
    yield "sweep all", lambda: sweep(model, tokens, edits, metric).frame
    for make in (ablate.zero, ablate.uniform):
        each = ablate.each(make, heads("all", model))
        yield f"sweep {make.__name__}", lambda each=each: sweep(model, tokens, each, ends).frame
    yield "attribution", lambda: patch.attribution(model, tokens, source, metric).frame
    yield "screen", lambda: patch.screen(model, tokens, source, metric).frame
    for how in ("resample", "zero", "mean"):
        yield (
            f"edges {how}",
            lambda how=how: (
                patch.edges(
                    model, tokens, None if how == "zero" else source, metric, how=how, exact="all"
                ).frame
            ),
        )
    known = circuit.nodes(["0.0", "1.1"], model)
    yield "keep", lambda: run(model, tokens, known.keep(source))
    yield "cut", lambda: run(model, tokens, circuit.edges(["0.1 -> 1.2.q"], model).cut(source))
    yield "evaluate", lambda: circuit.evaluate(model, known, tokens, source, metric, random=20).frame
    yield "patterns", lambda: patterns.attention(model, tokens).mean
    yield "lens", lambda: lens(model, tokens, metric).frame
    yield (
        "probe",
        lambda: probe.linear(model, tokens, tokens[:, 0].double(), positions=[0, 3], ridge=0.1).frame,
    )


def numbers(result: Any) -> list[float]:
    """Returns sum, norm and a fixed random projection of all numbers of a result."""
    if hasattr(result, "select_dtypes"):
        frame = result.select_dtypes("number")
        result = torch.tensor(frame[sorted(frame.columns)].to_numpy(float))
    x = (result if isinstance(result, Tensor) else torch.as_tensor(result)).double().flatten()
    x = x[x.isfinite()]
    weights = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [x.sum().item(), x.norm().item(), (weights @ x).item(), float(len(x))]


def made(name: str, models: tuple[Any, Any]) -> dict[str, Any]:
    """Makes all calls on a model and another of its kind, and returns their numbers by name."""
    found: dict[str, Any] = {}
    for label, call in calls(*models):
        try:
            found[f"{name}: {label}"] = numbers(call())
        except CircuitsError as error:
            found[f"{name}: {label}"] = type(error).__name__
    return found


def record() -> dict[str, Any]:
    """Makes all calls, and returns their numbers by name."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        models = {name: (lambda name=name: (native(name), native(name, 1))) for name in NATIVE}
        for name in BRIDGES:
            folders = [families.save(name, Path(scratch) / f"{name}-{seed}", seed) for seed in (0, 1)]
            models[name] = lambda folders=folders: tuple(families.boot(folder) for folder in folders)
        for name, make in models.items():
            found |= made(name, make())
    return found


def difference(one: Any, other: Any) -> float:
    """Returns the largest relative difference of two records; infinite where one of them is an exception's name."""
    if isinstance(one, str) or isinstance(other, str) or other is None:
        return 0.0 if one == other else float("inf")
    scale = max(abs(one[1]), 1e-12)
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / scale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the numbers as they are now")
    torch.set_num_threads(1)
    found = record()
    if parser.parse_args().write:
        FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        print(f"{len(found)} calls, {sum(isinstance(one, str) for one in found.values())} of them refused")
        return 0
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    differ = {name: difference(one, found.get(name)) for name, one in kept.items()}
    wrong = {name: by for name, by in differ.items() if by > TOLERANCE}
    for name, by in wrong.items():
        print(f"{name}: {kept[name]} -> {found.get(name)} ({by:.1g})")
    print(f"{len(kept) - len(wrong)} of {len(kept)} calls as they were")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
