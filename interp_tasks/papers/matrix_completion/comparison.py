"""A model beside methods that need no training, on variations of its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve, of_rows
from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import in_passes
from interp_tasks.measurement.paired import paired
from interp_tasks.measurement.subjects import Examples
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from torch import Tensor

    from tasks import Batch, Task

PAIRED = "Intervals: 95%, bootstrap over examples; effects are paired with the method on the same examples."

#: What solves for the baselines of a task, where nothing is said: all examples at once.
BATCHED = "batched"
#: What a row is compared with whose baseline is the right answer's.
TRUTH = "truth"
#: Examples of one pass hold at most this many tokens, whose activations stay in a processor's cache.
TOKENS_PER_PASS = 4096


def comparison_figures(frame: pandas.DataFrame) -> list[Figure]:
    """Returns a line for each model and each method, a panel per metric."""
    caption = "Solid: the checkpoints, with 95% intervals. Dashed: methods. Dotted: the matrices themselves."
    return [Figure(figure(frame), "Models and methods on the same examples", caption)]


@dataclass
class Comparison:
    """Examples of each variation, and what methods make of them: worked out once for all checkpoints."""

    examples: Examples
    solver: str = BATCHED
    batches: dict[Task, Batch] = field(default_factory=dict)
    outputs: dict[tuple[Task, str], dict[str, Any]] = field(default_factory=dict)

    def batch(self, task: Task) -> Batch:
        if task not in self.batches:
            self.batches[task] = self.examples.sample(task)
        return self.batches[task]

    def measured(self, task: Task, output: Tensor) -> dict[str, Any]:
        """Returns the task's metrics of an output, and its properties where the task names some."""
        describe = getattr(task, "properties", None)
        metrics = dict(task.metrics(output, self.batch(task)))
        return metrics if describe is None else metrics | describe(output)

    def by_method(self, task: Task, name: str) -> dict[str, Any]:
        """Returns the metrics of a method on a task, worked out once."""
        if (task, name) not in self.outputs:
            if self.examples.progress is not None:
                self.examples.progress(len(self.outputs), 0, name)
            examples = self.examples
            output = output_of_method(
                task, name, examples.samples, examples.seed, examples.split, self.solver
            )
            self.outputs[task, name] = self.measured(task, output)
        return self.outputs[task, name]

    def rows(self, task: Task, output: Tensor, methods: Sequence[str], seed: int) -> list[dict[str, Any]]:
        """Returns the model beside each method, and beside the truth as far as that has properties."""
        model_metrics = self.measured(task, output)
        rows = [
            {**row, "intervention": name}
            for name in methods
            for row in paired(model_metrics, self.by_method(task, name), seed)
        ]
        return rows + self.beside_truth(task, model_metrics, seed)

    def beside_truth(self, task: Task, model_metrics: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        describe = getattr(task, "properties", None)
        if describe is None:
            return []
        right = describe(self.batch(task).targets[..., None])
        return [
            {**row, "intervention": TRUTH}
            for row in paired({name: model_metrics[name] for name in right}, right, seed)
        ]


@lru_cache(maxsize=64)
def output_of_method(
    task: Task, name: str, samples: int | None, seed: int, split: str, solver: str = BATCHED
) -> Tensor:
    """Returns what a method makes of a task's examples, solved once per process: all models have the same ones."""
    given = {} if solver == BATCHED else {"solver": solver}
    output: Tensor = declared(task, "baselines", **given)[name](Examples(samples, seed, split).sample(task))
    return output


def declared(task: Task, noun: str, **given: Any) -> Mapping[str, Any]:
    """Returns the declaration that a task makes under a name; a UserError says that it makes none."""
    declare = getattr(task, noun, None)
    if declare is None:
        raise UserError(f"task {task.name!r} declares no {noun}: give it a method {noun}()")
    values: Mapping[str, Any] = declare(**given)
    return values


def chosen(known: Mapping[str, Any], names: Sequence[str], option: str, task: Task) -> list[str]:
    """Returns the chosen names, each known to the task."""
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name!r}: task {task.name!r} declares {', '.join(known)}")
    return list(dict.fromkeys(names))


def baseline_note(methods: Sequence[str]) -> str:
    """Returns what a table's column ``baseline`` is, without a full stop."""
    return f"baseline: {methods[0] if len(methods) == 1 else 'the method named under intervention'}"


def forward(model: Any, tokens: Tensor) -> Tensor:
    """Returns the model's output at all positions, on the CPU."""
    import torch

    from circuits import run

    device = next(model.parameters()).device
    return torch.cat([run(model, part.to(device)).cpu() for part in in_passes(tokens, TOKENS_PER_PASS)])


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws each metric over the variations of the data, of checkpoints and of the methods beside them."""
    frame = frame[frame["value"].notna() & frame["value_ci_low"].notna()]
    refs, methods = (list(dict.fromkeys(frame[column])) for column in ("ref", "intervention"))
    order = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(dict.fromkeys(frame["variant"])),
    }
    panels = []
    for metric, rows in frame.groupby("metric", sort=False):
        series: dict[str, Series] = {}
        for index, ref in enumerate(refs):
            part = rows[rows["ref"] == ref].drop_duplicates("variant")
            series[str(ref)] = of_rows(part, "variant", look=index)
        for index, method in enumerate(methods, start=len(refs)):
            # The examples are the same for all checkpoints, and so is what a method makes of them.
            part = rows[(rows["intervention"] == method) & rows["baseline"].notna()].drop_duplicates(
                "variant"
            )
            dash = {"line": {"dash": "dot" if method == "truth" else "dash"}}
            if len(part):
                series[str(method)] = of_rows(part, "variant", "baseline", style=dash, look=index)
        log = rows[["value", "value_ci_low", "value_ci_high", "baseline"]].min().min() > 0
        axes: dict[str, Any] = {"x": "variation of the data", "y": str(metric), "x_axis": order}
        panels.append(curve(series, log_y=bool(log), bars=True, height=280, **axes))
    return draw(panels)
