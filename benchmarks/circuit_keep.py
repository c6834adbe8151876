"""What a forward under a circuit costs beside a clean one: 12 layers of 12 heads, d 768, batch 4 x 16.

    python benchmarks/circuit_keep.py [--repeats 7] [--layers 12] [--clock cpu]

Circuits are random edges of the full graph, 32,936 of them at 12 layers, and kept from activations of the source, whose
own pass is apart. Clean and kept runs alternate; a line gives the median milliseconds with the range, and the median
ratio to the clean run beside it.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
import torch
from train_step import summary
from transformer_lens import HookedTransformer, HookedTransformerConfig

from circuits import cache, circuit, run

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SHARES = (0.0, 0.01, 0.1, 0.5, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = CLOCKS[options.clock]
    sizes = {"n_layers": options.layers, "n_heads": 12, "d_model": 768, "d_head": 64, "d_mlp": 3072}
    shape = {"n_ctx": 16, "d_vocab": 5000, "act_fn": "gelu_new", "normalization_type": "LNPre", "seed": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = HookedTransformer(HookedTransformerConfig(**sizes, **shape, device="cpu")).eval()
    tokens, source = torch.randint(5000, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    theirs = dict(cache(model, source, ["embed", "pos_embed", "z", "mlp_out"]))
    full = circuit.full(model)
    names, rng = list(full), np.random.default_rng(0)
    print(f"{len(full)} edges")
    for share in SHARES:
        chosen = rng.choice(len(names), int(share * len(names)), replace=False)
        kept = circuit.edges([names[index] for index in chosen], model).keep(theirs)
        run(model, tokens, kept)
        clean_times, times = [], []
        for _ in range(options.repeats):
            for edits, spent in (((), clean_times), ((kept,), times)):
                start = clock()
                run(model, tokens, *edits)
                spent.append(1e3 * (clock() - start))
        ratio = float(np.median(np.array(times) / np.array(clean_times)))
        print(
            f"{share:>5.0%} kept: clean {summary(clean_times, 0)}, kept {summary(times, 0)}, x {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
