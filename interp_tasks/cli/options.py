"""The options that commands share, and the commands of experiments: the options of their functions, and these."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

from interp_tasks.cli.command_building import (
    TYPES_ALONE,
    CommonOptions,
    make_command,
    make_parameter,
    parameters_of_dataclass,
    select_option_parameters,
)
from interp_tasks.cli.streams_and_exit_codes import progress_line
from interp_tasks.cli.tables import FORMATS, print_in_format, write_and_show
from interp_tasks.errors import UserError
from interp_tasks.file_io import check_writable_file
from interp_tasks.measurement.loaded_checkpoints import resolve_refs
from interp_tasks.measurement.option_parsing import DEVICE, PROMPT_METRICS, check_choice, unknown_name_error
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import EXPERIMENTS, FILES, PAGE, Experiment, find_view, result_file_path
from interp_tasks.setting_and_seed_parsing import import_file, parse_settings

if TYPE_CHECKING:
    from interp_tasks.checkpoints import ResolvedCheckpoint
    from interp_tasks.training.config import ResolvedConfig

REF_HELP = (
    "Checkpoint: RUN@4000, RUN@last, @all, @0:20000:2000 (end included), @pre, @onset, @end, @post, "
    "zoo:NAME@..., or a checkpoint folder. Repeat for several."
)
RUNS_HELP = "A run: its folder, a quoted glob of some, or zoo:NAME. Repeat for several."
RUNS = Annotated[list[str], typer.Option("--ckpt", metavar="RUN", help=RUNS_HELP)]
REFS = Annotated[list[str], typer.Option("--ckpt", metavar="REF", help=REF_HELP)]
REFS_OR_TASK = Annotated[
    list[str], typer.Option("--ckpt", metavar="REF", help=REF_HELP, show_default="none, with --task")
]
METRIC = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="Rows of this metric, or all.",
        show_default="the task's own; in json, csv and files all",
    ),
]

TOP = Annotated[
    int | None, typer.Option("--top", metavar="N", min=1, help="In the table: the N largest effects, ranked.")
]


def check_gflop_rate(rate: float | None) -> float | None:
    # A larger one no machine has.
    if rate is not None and not 0 < rate < 1e9:
        raise UserError(f"--rate {rate:g}: give GFLOP per second, more than 0 and below 1e+09, such as 20")
    return rate


FORMAT = Annotated[
    str,
    typer.Option(
        "--format",
        help="table, json or csv, on stdout.",
        callback=lambda value: check_choice("--format", value, FORMATS),
    ),
]
RATE = Annotated[
    float | None,
    typer.Option(
        "--rate", metavar="GFLOPS", help="GFLOP per second to reckon time with.", callback=check_gflop_rate
    ),
]


@dataclass(frozen=True, kw_only=True)
class ImportOptions(CommonOptions):
    """Tasks that a file of the user's brings."""

    import_path: Annotated[
        Path | None, typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks.")
    ] = None

    def import_tasks(self) -> None:
        if self.import_path is not None:
            import_file(self.import_path)


@dataclass(frozen=True, kw_only=True)
class PrintingOptions(ImportOptions):
    """Where rows are printed."""

    format: FORMAT = "table"


@dataclass(frozen=True, kw_only=True)
class ResultOptions(PrintingOptions):
    """Where a result goes."""

    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write parquet, csv and json files there.")
    ] = None
    plot: Annotated[bool, typer.Option("--plot", help="Write an HTML page with a figure.")] = False


def check_output_files_writable(name: str, out: Path | None, plot: bool) -> None:
    """Refuses, before slow work, files that could not be written after it."""
    for suffix in (*(FILES if out is not None else ()), *([PAGE] if plot else [])):
        check_writable_file(result_file_path(out or "", name, suffix))


@dataclass(frozen=True, kw_only=True)
class TaskAndPresetOptions(ImportOptions):
    """What is trained: a task's model, by a preset and what overrides it."""

    task: Annotated[str, typer.Argument(metavar="TASK", help="A task; interp-run tasks lists them.")]
    preset: Annotated[str, typer.Option("--preset", help="cpu, reference or paper.")] = "cpu"
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="As in train.steps=1000, task.n=5, model.d_model=64. Repeat."
        ),
    ] = field(default_factory=list)
    device: DEVICE = "cpu"

    def resolve(self) -> ResolvedConfig:
        """Returns the whole configuration, once tasks of the user's own are known."""
        from interp_tasks.training.config import resolve_config

        self.import_tasks()
        return resolve_config(self.task, self.preset, parse_settings(self.settings))


def experiment_command(line: str, experiment: Experiment) -> TyperCommand:
    """Returns the command of an experiment; its options are the parameters of its function and what all have."""
    signature = inspect.signature(experiment.function, eval_str=True, locals=TYPES_ALONE).parameters
    own, of_runs = select_option_parameters(signature.values()), "runs" in signature
    of_examples = any(each.kind is each.VAR_KEYWORD for each in signature.values())
    # Where an experiment compares no metrics, an option of that name is its own.
    of_metrics = not of_runs and find_view(experiment.name, "view_columns") is None
    own = [each for each in own if each.name not in experiment.without]
    if of_runs:
        examined = make_parameter("ckpt", RUNS)
    elif signature["refs"].default is inspect.Parameter.empty:
        examined = make_parameter("ckpt", REFS)
    else:
        examined = make_parameter("ckpt", REFS_OR_TASK, [])
    of_rows = [make_parameter("metric", METRIC, None), make_parameter("top", TOP, None)] if of_metrics else []

    def call(
        *,
        ckpt: list[str],
        import_path: Path | None,
        format: str,
        out: Path | None,
        plot: bool,
        quiet: bool,
        debug: bool,
        **asked: Any,
    ) -> None:
        metric = asked.pop("metric", None) if of_metrics else None
        top = asked.pop("top", None)
        check_output_files_writable(experiment.name, out, plot)
        if import_path is not None:
            import_file(import_path)
        # A list that is not given is left out.
        given: Any = {name: value for name, value in asked.items() if value != []}
        options: Any = {name: value for name, value in given.items() if name in Options.__annotations__}
        examples, found = Examples.of(options if of_examples else {}), cast(Any, ckpt)
        if not of_runs:
            missing = experiment.without
            found = resolve_refs(ckpt, examples, missing) if ckpt or examples.task is None else []
            if metric not in (None, "all") and examples.tokens is None and experiment.judged_by_task:
                check_metric_is_measured(metric, found, examples)
        with progress_line(quiet) as progress:
            if of_examples:
                given["progress"] = progress
            result = EXPERIMENTS[experiment.name].function(found, **given)
        written = [Path(asked["write"])] if asked.get("write") else []
        show = partial(print_in_format, result, format, metric, top)
        write_and_show(lambda: written + result.write(out, page=plot), show, quiet)

    parameters = [examined, *own, *of_rows, *parameters_of_dataclass(ResultOptions)]
    made = make_command(experiment.name, line, experiment.function, parameters, call)
    if experiment.samples is not None:
        (samples,) = (each for each in made.params if each.name == "samples")
        samples.show_default = str(experiment.samples)  # type: ignore[attr-defined]  # of an option, which this is
    return made


def check_metric_is_measured(metric: str, refs: Sequence[ResolvedCheckpoint], examples: Examples) -> None:
    """Refuses a metric that no task measures, before anything is measured."""
    from interp_tasks.measurement.result import strip_metric_suffixes

    if examples.prompts is not None:
        check_choice("--metric", strip_metric_suffixes(metric), PROMPT_METRICS)
        return
    own = examples.given_task()
    wholes = [own] if own is not None else [each.task for each in refs if each.task is not None]
    tasks = dict.fromkeys(part for whole in wholes for part in (whole.parts() or {"": whole}).values())
    names = list(dict.fromkeys(name for task in tasks for name in task.metric_names))
    more = {name for task in tasks for name in getattr(task, "property_names", ())}
    if strip_metric_suffixes(metric) not in {*names, *more}:
        raise unknown_name_error("--metric", metric, names, "write all, or one of")
