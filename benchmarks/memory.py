"""How much memory a verb takes at its default `batch_size`, beyond the model and its inputs.

    python benchmarks/memory.py [--only NAME] [--verb edges]

Four shapes, float32, random weights; examples × tokens and words as named. Each call runs in a process of its own; a
line gives the peak of its resident memory, less what stood before the call (torch, model, inputs), in GB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformer_lens import HookedTransformer

from circuits import ablate, heads, lens, patch, sweep

#: By name: layers, heads, width, examples, tokens, words.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "many words": (2, 4, 128, 256, 64, 20_000),
    "deep": (12, 12, 768, 16, 16, 200),
    "long": (4, 8, 256, 8, 512, 1_000),
    "many examples": (1, 4, 128, 12_769, 3, 113),
}
FEW: Mapping[str, int] = {"draws": 1, "flips": 1}


def metric(output: Tensor) -> Tensor:
    return output[:, -1, 0] - output[:, -1, 1]


def each_head(model: Any) -> dict[str, Any]:
    return ablate.each(ablate.zero, heads("all", model))


#: By name, the call of a verb on a model, tokens and a source.
VERBS: Mapping[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "sweep": lambda model, tokens, _: sweep(model, tokens, each_head(model), metric, **FEW),
    "sweep without a metric": lambda model, tokens, _: sweep(model, tokens, each_head(model), **FEW),
    "lens": lambda model, tokens, _: lens(model, tokens, metric),
    "attribution": lambda model, tokens, source: patch.attribution(model, tokens, source, metric, **FEW),
    "edges": lambda model, tokens, source: patch.edges(model, tokens, source, metric, **FEW),
}


def peak() -> float:
    """Returns the most resident memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(shape: str, verb: str) -> None:
    """Prints what one call takes."""
    layers, count, width, examples, length, words = SHAPES[shape]
    torch.set_num_threads(1)
    sizes = {"n_layers": layers, "n_heads": count, "d_model": width, "d_head": width // count}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = HookedTransformer(
            {**sizes, "d_mlp": 4 * width, "n_ctx": length, "d_vocab": words, "act_fn": "gelu", "seed": 0}
        )
    tokens = torch.randint(words, (examples, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens[:1])
    before = peak()
    VERBS[verb](model, tokens, tokens.flip(0))
    print(f"{shape:15} {examples} x {length}, {words} words: {verb:22} {peak() - before:6.2f} GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(SHAPES))
    parser.add_argument("--verb", choices=list(VERBS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        measure(given.only, given.verb)
        return
    for shape in [given.only] if given.only else SHAPES:
        for verb in [given.verb] if given.verb else VERBS:
            subprocess.run([sys.executable, __file__, "--here", "--only", shape, "--verb", verb], check=True)


if __name__ == "__main__":
    main()
