"""What `patch.edges` takes beside a clean forward: estimates of all edges, and exact effects of some.

    python benchmarks/edges.py [--layers 12] [--heads 12] [--width 768] [--effects 48] [--repeats 3] [--clock cpu]

Batch 4 x 16, vocabulary 200, float32, one thread. Estimates: five points, and one exact effect. Effects: edges drawn at
random. Repeats are interleaved; a line gives the
median milliseconds with the range, and the median ratio.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train_step import summary
from transformer_lens import HookedTransformer, HookedTransformerConfig

from circuits import patch, sweep

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
FEW = {"draws": 1, "flips": 1}


def metric(output: Tensor) -> Tensor:
    return output[:, -1].log_softmax(-1)[:, 0]


def drawn(layers: int, heads: int, count: int, source: Tensor) -> dict[str, Any]:
    """Returns so many paths from heads and MLPs to queries, keys, values, MLPs and the output behind them."""
    rng, found = random.Random(0), dict[str, Any]()
    while len(found) < count:
        early, late = sorted(rng.sample(range(layers), 2))
        sender = rng.choice([f"{early}.{rng.randrange(heads)}", f"mlp_out.{early}"])
        site = rng.choice(["q", "k", "v", "mlp_pre", "output"])
        of_head = (site, f"{late}.{rng.randrange(heads)}")
        receiver: Any = "output" if site == "output" else f"mlp_pre.{late}" if site == "mlp_pre" else of_head
        found[f"{sender} -> {receiver}"] = patch.path(sender, receiver, source)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("layers", 12), ("heads", 12), ("width", 768), ("effects", 48), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    given = parser.parse_args()
    torch.set_num_threads(1)
    clock = CLOCKS[given.clock]
    sizes = {"n_layers": given.layers, "n_heads": given.heads, "d_model": given.width}
    sizes |= {"d_head": given.width // given.heads, "d_mlp": 4 * given.width, "n_ctx": 16, "d_vocab": 200}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        config = HookedTransformerConfig(**sizes, act_fn="gelu_new", seed=0, device="cpu")
        model = HookedTransformer(config).eval()
    base, source = torch.randint(200, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    paths = drawn(given.layers, given.heads, given.effects, source)

    def forward() -> None:
        with torch.no_grad():
            model(base)

    peers: dict[str, Callable[[], Any]] = {
        "clean forward": forward,
        "estimates of all edges": lambda: patch.edges(model, base, source, metric, exact=1, **FEW),
        f"effects of {len(paths)} edges": lambda: sweep(model, base, paths, metric, **FEW),
    }
    times: dict[str, list[float]] = {name: [] for name in peers}
    for repeat in range(given.repeats + 1):
        for name, peer in peers.items():
            start = clock()
            peer()
            if repeat:  # the first is for the caches
                times[name].append(1e3 * (clock() - start))
    for name, spent in times.items():
        of_clean = float(np.median(np.array(spent) / np.array(times["clean forward"])))
        print(f"{name:<25} {summary(spent, 0)} ms, {of_clean:.1f} clean forwards")


if __name__ == "__main__":
    main()
