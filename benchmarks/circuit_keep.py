"""What a forward under a circuit costs beside a clean one: 12 layers of 12 heads, d 768, batch 4 x 16.

    python benchmarks/circuit_keep.py [--repeats 7] [--layers 12] [--clock cpu] [--bridge] [--shares 0.5]

Circuits are random edges of the full graph, 32,936 of them at 12 layers, kept from activations of the source, whose own
pass is apart. Clean and kept runs alternate; a line gives the median milliseconds with the range, and the median
ratio to the clean run beside it. `--bridge` takes a random GPT-2 of transformers in TransformerLens' bridge, of one
shape with the other.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch
from train_step import summary

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
    parser.add_argument("--bridge", action="store_true")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = CLOCKS[options.clock]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = (bridged if options.bridge else hooked)(options.layers).eval()
    tokens, source = torch.randint(5000, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    theirs = dict(cache(model, source, ["embed", "pos_embed", "z", "mlp_out"]))
    full = circuit.full(model)
    names, rng = list(full), np.random.default_rng(0)
    print(f"{len(full)} edges")
    for share in options.shares:
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


def hooked(layers: int) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": layers, "n_heads": 12, "d_model": 768, "d_head": 64, "d_mlp": 3072}
    shape = {"n_ctx": 16, "d_vocab": 5000, "act_fn": "gelu_new", "normalization_type": "LNPre", "seed": 0}
    return HookedTransformer(HookedTransformerConfig(**sizes, **shape, device="cpu"))


def bridged(layers: int) -> Any:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_head": 12, "n_embd": 768, "n_positions": 16, "vocab_size": 5000}
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


if __name__ == "__main__":
    main()
