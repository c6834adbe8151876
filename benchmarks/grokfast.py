"""What the Grokfast filters cost: time of a training step, and bytes kept, on the published benchmark's model.

    python benchmarks/grokfast.py [--repeats 40] [--threads 1] [--window 100]

Multiplication modulo 97, preset paper. A step is forward, loss, backward, filter and Adam on one fixed batch; steps
without a filter, with EMA and with the moving average (its queue full) run in turn within one process. Lines give the
median milliseconds with the range, the ratio to the step without a filter, pair by pair, and the filter's own time.
Bytes are counted, not sampled: what a run holds from one step to the next, and the gradients.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from train_step import milliseconds, summary

import tasks
from interp_tasks.training.config import parse_train_config, read_task_presets
from interp_tasks.training.fused_forward import FusedForward
from interp_tasks.training.parameter_update import Updater, amplify_by_ma

NONE = "none"


class Competitor:
    """A model with its updater on a batch of its own preset."""

    def __init__(self, changes: dict[str, object]) -> None:
        sections = read_task_presets("modular-multiplication")["paper"]
        self.task = tasks.get("modular-multiplication", **sections.get("task", {}))
        config = parse_train_config({**sections["train"], **changes})
        model = self.task.build_model(0, self.task.Model(**sections.get("model", {})))
        self.forward = FusedForward(model, self.task.read_positions)
        self.updater = Updater(model, config)
        self.batch = self.task.sample(config.batch_size, split="train")
        if config.grokfast == "ma":  # a queue that is not full adds nothing yet
            for _ in range(config.grokfast_window):
                for name, parameter in self.updater.parameters.items():
                    amplify_by_ma(self.updater.memory[name], torch.randn_like(parameter) * 1e-6, config)

    def step(self) -> None:
        self.task.loss(self.forward(self.batch.tokens), self.batch).backward()
        self.updater.set_learning_rate(100)
        self.updater.update_parameters()

    def filtering(self) -> None:
        """The filter alone, on gradients that are there."""
        if (kind := self.updater.config.grokfast) is not None:
            self.updater.filter_gradients(kind)

    def megabytes(self) -> float:
        """Weights, gradients, moments of Adam, memory of the filter."""
        weights = list(self.updater.parameters.values())
        kept = [*weights, *weights, *self.updater.resume_tensors().values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept) / 1e6


def times(work: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, step in work.items():
            found[name].append(milliseconds(step))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--window", type=int, default=100)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(options.threads)
    average = {"grokfast": "ma", "grokfast_lambda": 5.0, "grokfast_window": options.window}
    competitors = {
        NONE: Competitor({"grokfast": None}),
        "ema": Competitor({"grokfast": "ema"}),
        "ma": Competitor(average),
    }
    for each in competitors.values():
        each.step()
    steps = times({name: each.step for name, each in competitors.items()}, options.repeats)
    for each in competitors.values():
        each.task.loss(each.forward(each.batch.tokens), each.batch).backward()
    alone = times({name: each.filtering for name, each in competitors.items()}, options.repeats)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.repeats} interleaved steps")
    print(f"{'filter':8} {'step, ms':>22} {'/ none':>18} {'filter alone, ms':>22} {'MB':>7}")
    for name, each in competitors.items():
        ratios = [a / b for a, b in zip(steps[name], steps[NONE], strict=True)]
        print(
            f"{name:8} {summary(steps[name], 1):>22} {summary(ratios, 2):>18} {summary(alone[name], 2):>22} "
            f"{each.megabytes():7.1f}"
        )


if __name__ == "__main__":
    main()
