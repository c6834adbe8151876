"""Updates of several seeds at once against the same updates one seed after another.

    python benchmarks/seeds.py [--seeds 8] [--repeats 7] [--threads 1] [--clock wall|cpu] [--device cpu]
                               [--cases addition-7,addition-13]

Both are the trainer's own update: fresh batches where a case has them, fused forward, loss, backward, fused AdamW; the
stacked one maps the forward and the loss over a seed axis of the parameters. They run in turn within one process. A
line gives median seed-steps per second with the range, the ratio stacked / sequential, repeat by repeat, and how far
the weights of the two are apart at the end, in units of how far they have moved. --clock cpu counts the time of this
process alone, on a busy machine. Stacking wins where launching operations takes longer than computing them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import tasks
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.loop import Loop
from interp_tasks.training.stacked import Seed, Stack
from interp_tasks.training.trainer import prepare_model

#: Name -> task, its settings, those of the model, batch size (``None``: the whole split).
CASES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], int | None]] = {
    "addition-7": ("modular-addition", {"p": 7}, {"d_model": 32, "n_heads": 4}, None),
    "addition-13": ("modular-addition", {"p": 13}, {"d_model": 64, "n_heads": 4}, None),
    "addition-29": ("modular-addition", {"p": 29}, {"d_model": 128, "n_heads": 4}, None),
    "matrix-3x3": (
        "matrix-completion",
        {"n": 3, "rank": 1},
        {"d_model": 32, "n_heads": 2, "n_layers": 2},
        32,
    ),
    "matrix-4x4": (
        "matrix-completion",
        {"n": 4, "rank": 1},
        {"d_model": 64, "n_heads": 4, "n_layers": 3},
        128,
    ),
}


def competitors(case: str, n: int, device: str) -> tuple[dict[str, Callable[[], None]], Callable[[], float]]:
    """One update of every seed, either way, and how far apart the weights are in units of their change."""
    name, data, sizes, batch_size = CASES[case]
    task = tasks.get(name, **data)
    configs = [TrainConfig(batch_size=batch_size, seed=seed, eval_samples=8) for seed in range(n)]

    def models() -> list[Any]:
        return [prepare_model(task, task.Model(**sizes), config, device)[0] for config in configs]

    start, apart, together = models(), models(), models()
    loops = [
        Loop(task, model, config, device, (), None) for model, config in zip(apart, configs, strict=True)
    ]
    stack = Stack(
        [
            Seed(task, model, config, device, range(n), None)
            for model, config in zip(together, configs, strict=True)
        ]
    )
    steps = {"sequential": 0, "stacked": 0}

    def sequential() -> None:
        for loop in loops:
            loop.update(steps["sequential"])
        steps["sequential"] += 1

    def stacked() -> None:
        stack.update(steps["stacked"])
        steps["stacked"] += 1

    def distance() -> float:
        pairs = [
            (one, other, before)
            for models in zip(together, apart, start, strict=True)
            for (label, one), other, before in zip(
                models[0].named_parameters(), models[1].parameters(), models[2].parameters(), strict=True
            )
            # The gradient of b_K is rounding alone, and Adam divides it by its own size.
            if not label.endswith("b_K")
        ]
        change = max((other - before).abs().max().item() for _, other, before in pairs)
        return max((one - other).abs().max().item() for one, other, _ in pairs) / change

    return {"stacked": stacked, "sequential": sequential}, distance


def seconds(update: Callable[[], None], times: int, device: str, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(times):
        update()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return clock() - start


def summary(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--updates", type=int, default=10, help="per repeat")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    print(
        f"torch {torch.__version__}, {options.device}, {options.threads} thread(s), {options.seeds} seeds, "
        f"{options.repeats} interleaved repeats of {options.updates} updates, {options.clock} clock"
    )
    print(f"{'case':14} {'stacked /s':>24} {'sequential /s':>24}  ratio              apart by")
    for case in options.cases.split(","):
        updates, distance = competitors(case, options.seeds, options.device)
        for update in updates.values():
            update()
        taken: dict[str, list[float]] = {name: [] for name in updates}
        for _ in range(options.repeats):
            for name, update in updates.items():
                taken[name].append(seconds(update, options.updates, options.device, clock))
        done = options.seeds * options.updates
        rates = {name: [done / each for each in values] for name, values in taken.items()}
        ratios = [a / b for a, b in zip(rates["stacked"], rates["sequential"], strict=True)]
        columns = " ".join(f"{summary(rates[name], 0):>24}" for name in updates)
        print(f"{case:14} {columns}  {summary(ratios, 2)}  {distance():.0e}", flush=True)


if __name__ == "__main__":
    main()
