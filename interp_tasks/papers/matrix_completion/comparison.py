"""A model beside methods that need no training, on variations of its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve, of_rows
from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import in_passes
from interp_tasks.measurement.paired import paired
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.subjects import Examples
from interp_tasks.measurement.table import Row
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    from torch import Tensor

    from tasks import Batch, Task

#: What a row is compared with whose baseline is the right answer's.
TRUTH = "truth"
PAIRED = "Intervals: 95%, bootstrap over examples; effects are paired with the method on the same examples."

#: What solves for the baselines of a task, where nothing is said: all examples at once.
BATCHED = "batched"
#: Examples of one pass hold at most this many tokens, whose activations stay in a processor's cache.
TOKENS_PER_PASS = 4096


@dataclass(frozen=True)
class Comparison:
    """Methods beside models on examples of a task's variations."""

    examples: Examples
    solver: str = BATCHED

    def batch(self, task: Task) -> Batch:
        return batch_of(task, self.examples.samples, self.examples.seed, self.examples.split)

    def measured(self, task: Task, output: Tensor) -> dict[str, Any]:
        """Returns the task's metrics of an output, and its properties where the task names some."""
        describe = getattr(task, "properties", None)
        metrics = dict(task.metrics(output, self.batch(task)))
        return metrics if describe is None else metrics | describe(output)

    def by_method(self, task: Task, name: str) -> dict[str, Any]:
        """Returns the metrics of a method on a task."""
        drawn = self.examples.samples, self.examples.seed, self.examples.split
        return self.measured(task, output_of_method(task, name, *drawn, self.solver))

    def rows(self, task: Task, output: Tensor, methods: Sequence[str], seed: int) -> list[Row]:
        """Returns the model beside each method, and beside the truth as far as that has properties."""
        metrics = self.measured(task, output)
        rows = [
            {**row, "intervention": name}
            for name in methods
            for row in paired(metrics, self.by_method(task, name), seed)
        ]
        return rows + self.beside_truth(task, metrics, seed)

    def beside_truth(self, task: Task, metrics: Mapping[str, Any], seed: int) -> list[Row]:
        describe = getattr(task, "properties", None)
        right = {} if describe is None else describe(self.batch(task).targets[..., None])
        compared = paired({name: metrics[name] for name in right}, right, seed)
        return [{**row, "intervention": TRUTH} for row in compared]


@lru_cache(maxsize=64)
def batch_of(task: Task, samples: int | None, seed: int, split: str) -> Batch:
    """Returns the examples of a task, the same ones each time."""
    return Examples(samples, seed, split).sample(task)


@lru_cache(maxsize=64)
def output_of_method(
    task: Task, name: str, samples: int | None, seed: int, split: str, solver: str = BATCHED
) -> Tensor:
    """Returns what a method makes of a task's examples, solved once per process: all models have the same ones."""
    given = {} if solver == BATCHED else {"solver": solver}
    output: Tensor = declared(task, "baselines", **given)[name](batch_of(task, samples, seed, split))
    return output


def declared(task: Task, noun: str, **given: Any) -> Mapping[str, Any]:
    """Returns the declaration that a task makes under a name; a UserError says that it makes none."""
    declare = getattr(task, noun, None)
    if declare is None:
        raise UserError(f"task {task.name!r} declares no {noun}: give it a method {noun}()")
    values: Mapping[str, Any] = declare(**given)
    return values


def chosen(known: Mapping[str, Any], names: Sequence[str], option: str, task: Task) -> list[str]:
    """Returns the chosen names, each known to the task; all that it knows where none is chosen."""
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name!r}: task {task.name!r} declares {', '.join(known)}")
    return list(dict.fromkeys(names or known))


def forward(model: Any, tokens: Tensor) -> Tensor:
    """Returns the model's output at all positions, on the CPU."""
    import torch

    from circuits import run

    device = next(model.parameters()).device
    return torch.cat([run(model, part.to(device)).cpu() for part in in_passes(tokens, TOKENS_PER_PASS)])


def figures(result: Result) -> list[Figure]:
    """Returns a line for each model and each method over the variations of the data, a panel per metric."""
    frame = result.frame[result.frame["value"].notna() & result.frame["value_ci_low"].notna()]
    refs, methods = (list(dict.fromkeys(frame[column])) for column in ("ref", "intervention"))
    variants = list(dict.fromkeys(frame["variant"]))
    order = {"type": "category", "categoryorder": "array", "categoryarray": variants}
    panels = []
    for metric, rows in frame.groupby("metric", sort=False):
        series: dict[str, Series] = {}
        for index, ref in enumerate(refs):
            part = rows[rows["ref"] == ref].drop_duplicates("variant")
            series[str(ref)] = of_rows(part, "variant", look=index)
        for index, method in enumerate(methods, start=len(refs)):
            # The examples are the same for all checkpoints, and so is what a method makes of them.
            of_method = rows[(rows["intervention"] == method) & rows["baseline"].notna()]
            dash = {"line": {"dash": "dot" if method == TRUTH else "dash"}}
            if len(part := of_method.drop_duplicates("variant")):
                series[str(method)] = of_rows(part, "variant", "baseline", style=dash, look=index)
        log = rows[["value", "value_ci_low", "value_ci_high", "baseline"]].min().min() > 0
        axes: dict[str, Any] = {"x": "variation of the data", "y": str(metric), "x_axis": order}
        panels.append(curve(series, log_y=bool(log), bars=True, height=280, **axes))
    caption = "Solid: the checkpoints, with 95% intervals. Dashed: methods. Dotted: the matrices themselves."
    return [Figure(draw(panels), "Models and methods on the same examples", caption)]
