"""One sweep of a model of a billion parameters, divided: stopped, given again, and compared with one process.

    python benchmarks/large_sweep.py alone FOLDER [--layers 16 --width 2048 --heads 32 --step 16 --examples 8]
    python benchmarks/large_sweep.py divided FOLDER     # on Dask, one worker; stop it by kill -9, and give it again
    python benchmarks/large_sweep.py compare FOLDER

Random weights: gated, rotary, four heads to a key-value group, 16 tokens, 2,000 words. Every --step-th head is set to
zero. A line gives the seconds, the most bytes of the sweep's own tensors, and the most memory that a process had.
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from circuits import SweepResult, ablate, sweep
from interp_tasks.grids import Done


def build(layers: int = 16, width: int = 2048, heads: int = 32) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the class is deprecated
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        torch.manual_seed(0)
        cfg = HookedTransformerConfig(
            n_layers=layers,
            d_model=width,
            n_heads=heads,
            d_head=width // heads,
            n_key_value_heads=heads // 4,
            d_mlp=4 * width,
            n_ctx=16,
            d_vocab=2000,
            act_fn="silu",
            gated_mlp=True,
            normalization_type="RMS",
            positional_embedding_type="rotary",
            rotary_dim=width // heads,
        )
        return HookedTransformer(cfg).eval()


def metric(output: Tensor) -> Tensor:
    return output[:, -1].log_softmax(-1)[:, 0]


def swept(given: argparse.Namespace, **divided: Any) -> SweepResult:
    import large_sweep  # by the name that workers know it by

    tokens = torch.randint(0, 2000, (given.examples, 16), generator=torch.Generator().manual_seed(1))
    every = [f"{layer}.{head}" for layer in range(given.layers) for head in range(given.heads)]
    load = partial(large_sweep.build, given.layers, given.width, given.heads)
    return sweep(
        load if divided else load(),
        tokens,
        ablate.each(ablate.zero, every[:: given.step]),
        metric=large_sweep.metric,
        chunk=128,
        draws=200,
        flips=999,
        **divided,
    )


def on_dask(given: argparse.Namespace) -> SweepResult:
    from distributed import Client, LocalCluster

    half = {"examples": -(-given.examples // 2), "variants": 8}
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, memory_limit=0) as cluster,
        Client(cluster) as client,
        Done(given.folder / "units") as done,
    ):
        print(f"done before: {done}", flush=True)
        result = swept(given, executor=client.get_executor(pure=False), split=half, done=done)
        print(f"done: {done}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("how", choices=["alone", "divided", "compare"])
    parser.add_argument("folder", type=Path)
    for name, default in (("layers", 16), ("width", 2048), ("heads", 32), ("step", 16), ("examples", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    if given.how == "compare":
        alone, divided = (pd.read_pickle(given.folder / f"{how}.pkl") for how in ("alone", "divided"))
        print(f"{len(alone)} rows, the same bits: {alone.equals(divided)}")
        return
    start = time.perf_counter()
    result = swept(given) if given.how == "alone" else on_dask(given)
    result.frame.to_pickle(given.folder / f"{given.how}.pkl")
    taken = time.perf_counter() - start
    peaks = [
        resource.getrusage(who).ru_maxrss / 1e6 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    print(
        f"{given.how}: {taken:.0f} s, engine {', '.join(set(result.frame['engine']))}, tensors of the sweep "
        f"{result.settings['bytes'] / 1e9:.2f} GB, this process {peaks[0]:.2f} GB, its workers {peaks[1]:.2f} GB"
    )


if __name__ == "__main__":
    main()
