"""``interp-run tasks list``, ``tasks cost`` and ``tasks data``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks import experiments
from interp_tasks.cli.options import (
    FORMAT,
    RATE,
    PrintingOptions,
    ResultOptions,
    TaskAndPresetOptions,
    check_output_files_writable,
)
from interp_tasks.cli.streams_and_exit_codes import write_line
from interp_tasks.cli.tables import print_in_format, print_rows, write_and_show
from interp_tasks.setting_and_seed_parsing import check_task_name, parse_task_settings
from interp_tasks.text_formatting import format_bytes, format_duration, format_flop

if TYPE_CHECKING:
    from interp_tasks.training.cost import Cost


def list_tasks(printing: PrintingOptions) -> None:
    """List the tasks there are, with their presets."""
    from interp_tasks.training.config import read_task_presets
    from tasks import registry

    printing.import_tasks()
    rows: list[dict[str, Any]] = [
        {
            "task": name,
            "preset": preset,
            "settings": {
                f"{section}.{key}": value
                for section, values in sections.items()
                for key, value in values.items()
            },
        }
        for name in registry.task_names()
        for preset, sections in read_task_presets(name).items()
    ]
    if printing.format != "table":
        print_rows(rows, printing.format, [])
        return
    for row in rows:
        own = {key.partition("task.")[2]: value for key, value in row["settings"].items()}
        row["of the task"] = {key: value for key, value in own.items() if key}
        row["steps"] = row["settings"].get("train.steps", "")
    print_rows(rows, "table", ["task", "preset", "of the task", "steps"])
    write_line("")
    write_line("All settings of the presets, of models and training too: --format json.")


def cost(recipe: TaskAndPresetOptions, rate: RATE = None, format: FORMAT = "table") -> None:
    """Say what training would take: parameters, FLOP, memory, disk, time.

    Counted without training; the time is given at a --rate.
    """
    resolved = recipe.resolve()
    from interp_tasks.training.cost import cost

    task = resolved.make_task()
    estimate = cost(task, settings=resolved.model, config=resolved.train, gflop_per_second=rate)
    if format == "table":
        print_rows(cost_rows(estimate), "table", ["quantity", "amount"])
    else:
        print_rows([asdict(estimate)], format, [])


def cost_rows(cost: Cost) -> list[dict[str, str]]:
    """Returns the lines of the table."""
    frozen = cost.parameters - cost.trained
    parts: list[Any] = [
        ("weights", cost.weights_bytes),
        ("gradients", cost.gradients_bytes),
        ("optimiser and filter", cost.state_bytes),
        ("activations", cost.activations_bytes),
    ]
    memory = ", ".join(f"{noun} {format_bytes(count)}" for noun, count in parts if count)
    lines = {
        "parameters": f"{cost.parameters:,}" + (f" ({frozen:,} of them frozen)" if frozen else ""),
        "a step": f"{format_flop(cost.step_flop)}, {cost.examples:,} examples",
        "the run": f"{format_flop(cost.run_flop)}, {cost.steps:,} steps with the metrics logged between them",
        "memory": f"{format_bytes(cost.memory_bytes)}: {memory}",
        "disk": f"{format_bytes(cost.disk_bytes)}, {cost.checkpoints} checkpoints",
    }
    if cost.seconds is not None:
        lines["time"] = format_duration(cost.seconds)
    return [{"quantity": quantity, "amount": amount} for quantity, amount in lines.items()]


def data(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task; interp-run tasks lists them.")],
    output: ResultOptions,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of the task, as in task.p=11. Repeatable."),
    ] = [],  # noqa: B006  (never changed)
) -> None:
    """Look at a task's data: how many classes its answers have, and what guessing gets.

    Of tasks with a grid of inputs; with --plot a page has the answers over it.
    """
    check_output_files_writable("data", output.out, output.plot)
    output.import_tasks()
    check_task_name(task)
    result = experiments.data(task, parse_task_settings(task, settings))
    show = partial(print_in_format, result, output.format)
    write_and_show(lambda: result.write(output.out, page=output.plot), show, output.quiet)
