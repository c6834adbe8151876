"""How well rankings of edges find circuits that are known: seven transformers compiled from programs by tracr.

    python benchmarks/known_circuits.py [--models hist,sort] [--pairs 64] [--seed 0]

The models, and which of their edges matter where an edge carries another input's value: tests/data/known_circuits.
Base are inputs of full length, source the same rolled by one. A line is a ranking on one model, in the compiled basis
and in a random one (the residual stream rotated, which changes no output):

    gradient      the gradient at base, of the projection
    integrated    the mean of the gradients at 5 points between the inputs, of the projection and of the distance
    exact         every edge measured, of the distance

projection: the output along clean − source, summed over the positions that are read; distance: the squared distance
from the clean output there, which has no gradient at base. The columns: AUROC; precision and recall of the first k
edges, k the true number, where an edge whose size is 0 is not chosen; how many edges were measured exactly, at least
one; and the forwards spent, with these, those of backward passes and of the
metric's own clean runs.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformer_lens import HookedTransformer, HookedTransformerConfig

from circuits import circuit, patch, run

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "known_circuits"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
#: Ranking, and its metric: arguments of patch.edges, and the column that ranks.
RANKINGS: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("gradient", "projection"): ({"method": "gradient", "exact": 1}, "estimate"),
    ("integrated", "projection"): ({"method": "integrated", "exact": 1}, "estimate"),
    ("integrated", "distance"): ({"method": "integrated", "exact": 1}, "estimate"),
    ("exact", "distance"): ({"method": "gradient", "exact": "all"}, "effect"),
}


@dataclass(frozen=True)
class Known:
    """A model whose circuit is known.

    Attributes:
        tokens: inputs by length, [n length].
        read: the positions that are read, boolean, in the same way.
        truth: the edges that matter where an edge carries another input's value.
    """

    name: str
    model: HookedTransformer
    tokens: dict[int, Tensor]
    read: dict[int, Tensor]
    truth: circuit.Circuit
    described: dict[str, Any]

    @classmethod
    def load(cls, name: str, rotated_by: int | None = None) -> Known:
        """Loads one of the models, float32 and in eval mode.

        Args:
            rotated_by: seed of a rotation of the residual stream; None for the basis that was compiled.
        """
        described = json.loads((FOLDER / f"{name}.json").read_text())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            model = HookedTransformer(HookedTransformerConfig(**described["config"], device="cpu")).eval()
        weights = load_file(FOLDER / f"{name}.safetensors")
        model.load_state_dict(weights if rotated_by is None else rotated(weights, rotated_by), strict=False)
        tokens: dict[int, list[list[int]]] = {}
        read: dict[int, list[list[bool]]] = {}
        for example in described["data"]:
            length = len(example["tokens"])
            tokens.setdefault(length, []).append(example["tokens"])
            read.setdefault(length, []).append([value is not None for value in example["expected"]])
        truth = circuit.edges(
            [f"{a} -> {b}" for a, b in described["circuit"]["edges_matter_resample"]], model
        )
        lengths = sorted(tokens)
        return cls(
            name,
            model,
            {length: torch.tensor(tokens[length]) for length in lengths},
            {length: torch.tensor(read[length]) for length in lengths},
            truth,
            described,
        )

    def pairs(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns base, source (rolled by one) and the positions read, of inputs of full length."""
        base, read = (each[max(each)][:count] for each in (self.tokens, self.read))
        return base, base.roll(1, 0), read

    def metric(
        self, kind: str, base: Tensor, source: Tensor, read: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns a metric of outputs and the numbers of their examples: see the top of this file."""
        clean, other = run(self.model, base), run(self.model, source)

        def projection(output: Tensor, rows: Tensor) -> Tensor:
            return ((output * (clean - other)[rows]).sum(-1) * read[rows]).sum(1)

        def distance(output: Tensor, rows: Tensor) -> Tensor:
            return ((output - clean[rows]).square().sum(-1) * read[rows]).sum(1)

        return {"projection": projection, "distance": distance}[kind]


def rotated(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Returns the weights of the same function with the residual stream rotated; there are no norms on the way."""
    size = weights["embed.W_E"].shape[1]
    generator = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    found = {}
    for name, weight in weights.items():
        kind = name.split(".")[-1]
        if kind in ("W_E", "W_pos", "W_O", "W_out", "b_O", "b_out"):
            weight = (weight.double() @ rotation).to(weight.dtype)
        elif kind in ("W_Q", "W_K", "W_V", "W_in", "W_U"):
            weight = (rotation.T @ weight.double()).to(weight.dtype)
        found[name] = weight.contiguous()
    return found


@contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """Counts the forwards of a model inside the block, one entry each."""
    forwards: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        yield forwards
    finally:
        handle.remove()


def ranked(known: Known, ranking: tuple[str, str], pairs: int) -> tuple[dict[str, float], int, int]:
    """Returns the size of every edge under a ranking, the forwards spent, and how many edges were measured."""
    (_, kind), (arguments, column) = ranking, RANKINGS[ranking]
    base, source, read = known.pairs(pairs)
    metric = known.metric(kind, base, source, read)
    rows = torch.arange(len(base))
    with counting(known.model) as forwards:
        found = patch.edges(known.model, base, source, metric, batch=rows, draws=1, flips=1, **arguments)
    frame = found.frame.assign(best=found.frame["effect"].fillna(found.frame["estimate"]))
    names = list(circuit.edges(found.frame["variant"].tolist(), known.model))
    by_name = {
        next(iter(circuit.edges([variant], known.model))): abs(size)
        for variant, size in zip(frame["variant"], frame[column], strict=True)
    }
    measured = int(frame["effect"].notna().sum())
    return {name: by_name[name] for name in names}, len(forwards), measured


def scores(sizes: dict[str, float], truth: circuit.Circuit) -> dict[str, float]:
    """Returns AUROC (ties count half), and precision and recall at the true size."""
    names, values = list(sizes), np.array(list(sizes.values()))
    true = np.array([name in truth for name in names])
    above = (values[true][:, None] > values[~true]).mean() + (
        values[true][:, None] == values[~true]
    ).mean() / 2
    order = np.argsort(-values, kind="stable")[: true.sum()]
    chosen = order[values[order] > 0]
    hits = true[chosen].sum()
    return {
        "AUROC": float(above),
        "precision": float(hits / len(chosen)) if len(chosen) else float("nan"),
        "recall": float(hits / true.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(NAMES), help="names, joined by commas")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the random basis")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = f"{'model':<16}{'basis':<10}{'ranking':<12}{'metric':<12}{'true':>5}{'of':>5}"
    print(head + f"{'AUROC':>8}{'precision':>11}{'recall':>8}{'measured':>10}{'forwards':>10}")
    for name in options.models.split(","):
        for basis, seed in (("compiled", None), ("random", options.seed)):
            known = Known.load(name, seed)
            for ranking in RANKINGS:
                sizes, forwards, measured = ranked(known, ranking, options.pairs)
                row = scores(sizes, known.truth)
                line = f"{name:<16}{basis:<10}{ranking[0]:<12}{ranking[1]:<12}{len(known.truth):>5}{len(sizes):>5}"
                print(
                    line
                    + f"{row['AUROC']:>8.3f}{row['precision']:>11.2f}{row['recall']:>8.2f}{measured:>10}{forwards:>10}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
