"""A sweep over every head, against the same sweep written as a loop.

    python benchmarks/sweep.py [--only 4L8H] [--batch 64] [--repeats 5] [--device cpu]
        [--kind zero] [--peers hooks [--share 12]] [--dtype bfloat16] [--times-only] [--clock cpu]

Peers run in one process, with the same threads, the same model and tokens, without gradients, and read the same
positions; repeats are interleaved, and a time is the median with its range. "hooks" is a loop of `run_with_hooks`, one
forward per head; "patching" is transformer_lens.patching's own loop. Both end with the same number per head, which is
checked. Statistics (bootstrap, p-values) are switched off, as the loops have none, but in "statistics", and in "first",
the first sweep of so many examples in a process, which draws the resamples that later ones share.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from transformer_lens import HookedTransformer, HookedTransformerConfig, patching

from circuits import SweepResult, ablate, heads, patch, sweep
from circuits.statistics import _cached_draws

#: Those that a sweep makes by default.
STATISTICS = {"draws": 1000, "flips": 9999}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Case:
    name: str
    n_layers: int
    n_heads: int
    d_model: int
    length: int
    batches: tuple[int, ...]
    d_vocab: int
    d_vocab_out: int
    attention_dir: str
    read: tuple[int, ...] | None  # positions that the metric reads; None: all
    other: tuple[tuple[str, Any], ...] = ()  # settings beyond these

    def model(self, device: str, dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "d_model": self.d_model,
            "d_head": self.d_model // self.n_heads,
            "d_mlp": 4 * self.d_model,
            "n_ctx": self.length,
            "d_vocab": self.d_vocab,
            "d_vocab_out": self.d_vocab_out,
            "act_fn": "relu",
            "normalization_type": "LN",
            "attention_dir": self.attention_dir,
        }
        cfg = HookedTransformerConfig(**{**sizes, **dict(self.other)}, device=device, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the class is deprecated
            return HookedTransformer(cfg).eval()


_RMS = (("normalization_type", "RMS"), ("positional_embedding_type", "rotary"), ("gated_mlp", True))
_GROUPED = (*_RMS, ("n_key_value_heads", 4))
_GPT2 = (("act_fn", "gelu_new"),)

CASES = (
    # The sizes of modular addition, of matrix completion, and of its largest published model on 4x4 matrices.
    Case("1L4H d128 T3", 1, 4, 128, 3, (64, 2048), 114, 113, "causal", (2,)),
    Case("4L8H d256 T49", 4, 8, 256, 49, (1, 64, 512), 202, 1, "bidirectional", None),
    Case("12L12H d768 T16", 12, 12, 768, 16, (1, 16), 202, 1, "bidirectional", None),
    # The shapes of common models, with few words, so that the blocks are what counts.
    *(
        Case(name, 12, 12, 768, 16, (4,), 200, 200, "causal", read, other)
        for name, read, other in (
            ("GPT-2", None, _GPT2),
            ("last position", (15,), _GPT2),
            ("Llama", None, (*_GROUPED, ("act_fn", "silu"), ("d_mlp", 2048))),
            (
                "Pythia",
                None,
                (("parallel_attn_mlp", True), ("positional_embedding_type", "rotary"), ("act_fn", "gelu")),
            ),
            (
                "Gemma",
                None,
                (
                    *_GROUPED,
                    ("act_fn", "gelu_new"),
                    ("use_normalization_before_and_after", True),
                    ("attn_scores_soft_cap", 50.0),
                    ("output_logits_soft_cap", 30.0),
                    ("use_local_attn", True),
                    ("attn_types", ["local", "global"] * 6),
                    ("window_size", 8),
                ),
            ),
        )
    ),
    Case("small Llama", 6, 4, 64, 8, (4,), 50, 50, "causal", None, (*_RMS, ("act_fn", "silu"))),
)


@dataclass(frozen=True)
class Setting:
    case: Case
    model: Any
    tokens: Tensor
    source: Tensor
    share: int = 1  # of the loops' forwards one in so many is run

    def metric(self, output: Tensor) -> Tensor:
        """The mean of what is read, per example."""
        read = output if self.case.read is None else output[:, list(self.case.read)]
        return read.flatten(1).float().mean(1)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        every = [(x, y) for x in range(self.case.n_layers) for y in range(self.case.n_heads)]
        return every[:: self.share]


def zero_by_hooks(setting: Setting) -> list[float]:
    found = []
    for layer, head in setting.pairs:

        def hook(z: Tensor, hook: Any, head: int = head) -> Tensor:
            z[:, :, head] = 0
            return z

        output = setting.model.run_with_hooks(
            setting.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", hook)]
        )
        found.append(float(setting.metric(output).double().mean()))
    return found


def patch_by_hooks(setting: Setting) -> list[float]:
    _, cache = setting.model.run_with_cache(setting.source, names_filter=lambda name: name.endswith("hook_z"))
    found = []
    for layer, head in setting.pairs:
        name = f"blocks.{layer}.attn.hook_z"

        def hook(z: Tensor, hook: Any, head: int = head, name: str = name) -> Tensor:
            z[:, :, head] = cache[name][:, :, head]
            return z

        output = setting.model.run_with_hooks(setting.tokens, fwd_hooks=[(name, hook)])
        found.append(float(setting.metric(output).double().mean()))
    return found


def patch_by_transformer_lens(setting: Setting) -> list[float]:
    _, cache = setting.model.run_with_cache(setting.source, names_filter=lambda name: name.endswith("hook_z"))
    with contextlib.redirect_stderr(io.StringIO()):
        found = patching.get_act_patch_attn_head_out_all_pos(
            setting.model, setting.tokens, cache, lambda output: setting.metric(output).double().mean()
        )
    return [float(value) for value in found.flatten()]


def ours(setting: Setting, make: Callable[[Any], Any], **options: Any) -> list[float]:
    result = swept(setting, make, **options)
    return [float(value) for value in result.frame["value"]]


def swept(setting: Setting, make: Callable[[Any], Any], **options: Any) -> SweepResult:
    """Without statistics, which a loop of hooks has none of, unless `options` says how many draws and flips."""
    variants = ablate.each(make, heads("all", setting.model))
    return sweep(
        setting.model,
        setting.tokens,
        variants,
        metric=setting.metric,
        positions=setting.case.read,
        **{"draws": 1, "flips": 1, **options},
    )


def first(setting: Setting) -> list[float]:
    """With statistics, as the first sweep of so many examples in a process, which draws their resamples."""
    _cached_draws.cache_clear()
    return ours(setting, ablate.zero, **STATISTICS)


def from_source(source: Tensor) -> Callable[[Any], Any]:
    return lambda head: patch.activations("z", source, heads=head)


def sweeps(setting: Setting) -> dict[str, dict[str, Callable[[], list[float]]]]:
    """What is compared: for each kind of sweep, its peers; ours first."""
    return {
        "zero": {
            "fast": lambda: ours(setting, ablate.zero),
            "statistics": lambda: ours(setting, ablate.zero, **STATISTICS),
            "first": lambda: first(setting),
            "naive": lambda: ours(setting, ablate.zero, engine="naive"),
            "hooks": lambda: zero_by_hooks(setting),
        },
        "patch": {
            "fast": lambda: ours(setting, from_source(setting.source)),
            "patching": lambda: patch_by_transformer_lens(setting),
            "hooks": lambda: patch_by_hooks(setting),
        },
    }


def timed(
    peers: dict[str, Callable[[], list[float]]], repeats: int, device: str, clock: Callable[[], float]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """What each finds, and the seconds it takes."""
    found: dict[str, list[float]] = {}
    taken: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(repeats + 1):
        for name, peer in peers.items():
            _wait(device)
            start = clock()
            found[name] = peer()
            _wait(device)
            # The first turn warms up.
            if turn:
                taken[name].append(clock() - start)
    return found, taken


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Memory(TorchDispatchMode):
    """The most bytes that tensors made inside have held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                # A view has the storage of what it is a view of; one that was there before is not counted.
                if storage.data_ptr() and id(storage) not in self._known and not _is_view(function):
                    self._add(storage)
        return found

    def _add(self, storage: Any) -> None:
        size, key = storage.nbytes(), id(storage)
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def _is_view(function: Any) -> bool:
    schema = getattr(function, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


@dataclass(frozen=True)
class Counts:
    gflop: float  # of matrix products, as torch counts them
    megabytes: float
    forwards: int  # of the unembedding

    def __str__(self) -> str:
        return f"{self.gflop:8.2f} GFLOP {self.megabytes:7.1f} MB {self.forwards:5} forwards"


def counted(peer: Callable[[], Any]) -> Counts:
    forwards = 0

    def look(module: Any, inputs: Any) -> None:
        nonlocal forwards
        # Not the model's own call, which `run_with_hooks` goes round.
        forwards += module.__class__.__name__ == "Unembed"

    # Of a hook on all modules the sweep knows that it only looks on where torch itself has put it.
    look.__module__ = "torch.utils."
    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        with FlopCounterMode(display=False) as counter:
            peer()
    finally:
        handle.remove()
    with Memory() as memory:
        peer()
    return Counts(counter.get_total_flops() / 1e9, memory.peak / 1e6, forwards)


def exact(setting: Setting) -> float:
    """GFLOP of one clean forward, and of every head's from its block on: the least that resuming can take."""
    with FlopCounterMode(display=False) as counter:
        setting.model(setting.tokens)
    whole = counter.get_total_flops()
    case = setting.case
    unembed = 2 * setting.tokens.numel() * case.d_model * case.d_vocab_out
    block = (whole - unembed) / case.n_layers
    heads_from = sum((case.n_layers - layer) * block + unembed for layer in range(case.n_layers))
    return float(whole + case.n_heads * heads_from) / 1e9


def settings(only: str | None, device: str, dtype: torch.dtype, share: int) -> Iterator[Setting]:
    for case in CASES:
        if only is not None and only not in case.name:
            continue
        model = case.model(device, dtype)
        for batch in case.batches:
            draw = partial(torch.randint, 0, case.d_vocab, (batch, case.length))
            tokens, source = (
                draw(generator=torch.Generator().manual_seed(seed)).to(device) for seed in (1, 2)
            )
            yield Setting(case, model, tokens, source, share)


def compare(setting: Setting, given: argparse.Namespace) -> None:
    kinds = sweeps(setting)
    for kind, all_peers in kinds.items():
        if given.kind not in (None, kind.split()[0]):
            continue
        wanted = ("fast", *(given.peers.split(",") if given.peers else all_peers))
        peers = {name: peer for name, peer in all_peers.items() if name in wanted}
        values, times = timed(peers, given.repeats, given.device, CLOCKS[given.clock])
        mine = torch.tensor(values["fast"])
        for name, theirs in values.items():
            looped = name == "hooks" and setting.share > 1
            times[name] = [setting.share * one for one in times[name]] if looped else times[name]
            ours_here = mine[:: setting.share] if looped else mine
            apart = (ours_here - torch.tensor(theirs)).abs().max() / (mine - mine.mean()).abs().max().clamp(
                min=1e-12
            )
            assert apart < (1e-3 if given.dtype == "float32" else 0.2), f"{name} differs by {apart:.1e}"
        for name, taken in times.items():
            counts: Any = "" if given.times_only else counted(peers[name])
            if not given.times_only and name == "fast":
                counts = f"{counts} ({exact(setting) / counts.gflop:.2f} of them needed to resume)"
            ratios = [theirs / own for theirs, own in zip(taken, times["fast"], strict=True)]
            loop = [theirs / own for theirs, own in zip(taken, times.get("hooks", taken), strict=True)]
            print(
                f"{setting.case.name:16} batch {len(setting.tokens):5}  {kind:10} {name:10}"
                f" {statistics.median(taken) * 1e3:9.1f} ms ({min(taken) * 1e3:.1f}-{max(taken) * 1e3:.1f})"
                f" {counts}  x{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                " the fast engine's time,"
                f" x{statistics.median(loop):.2f} ({min(loop):.2f}-{max(loop):.2f}) that of hooks",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--batch", type=int, help="this batch size alone")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kind", choices=["zero", "patch"], help="this edit alone")
    parser.add_argument("--peers", help="beside the fast engine these only, divided by commas")
    parser.add_argument(
        "--times-only", action="store_true", help="without operations and memory, which take two more runs"
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of this process, on a busy machine"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--share", type=int, default=1, help="time one in so many forwards of the loop, for all of them"
    )
    given = parser.parse_args()
    if given.share > 1 and not (given.peers == "hooks" and given.times_only):
        parser.error("--share is of --peers hooks --times-only")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.device}, {given.clock} time")
    with torch.no_grad():
        dtype = getattr(torch, given.dtype)
        for setting in settings(given.only, given.device, dtype, given.share):
            if given.batch is None or len(setting.tokens) == given.batch:
                compare(setting, given)


if __name__ == "__main__":
    main()
