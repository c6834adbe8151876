"""The options that commands share, and the commands of experiments: the options of their functions, and these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from interp_tasks.cli.command import CommonOptions, command_of
from interp_tasks.cli.output import FORMATS, PICTURES, PLOT_FORMATS, check_targets, emit
from interp_tasks.cli.terminal import progress_line
from interp_tasks.devices import check_written_device
from interp_tasks.errors import UserError
from interp_tasks.files import check_file
from interp_tasks.measurement.experiment import EXPERIMENTS, Experiment
from interp_tasks.measurement.options import PROMPT_METRICS, check_choice, check_samples, check_seed, unknown
from interp_tasks.measurement.run_logs import find_runs
from interp_tasks.measurement.subjects import (
    Examples,
    Options,
    Progress,
    resolve_refs,
    task_of,
)
from interp_tasks.settings import check_task_name, import_file, parse_settings, task_config

if TYPE_CHECKING:
    from interp_tasks.checkpoints import ResolvedCheckpoint
    from interp_tasks.experiments import Result
    from interp_tasks.training.config import Resolved

REF_HELP = (
    "Checkpoint: RUN@4000, RUN@last, @all, @0:20000:2000 (end included), @pre, @onset, @end, @post, "
    "zoo:NAME@..., or a checkpoint folder. Repeat for several."
)
RUNS_HELP = "A run: its folder, a quoted glob of some, or zoo:NAME. Repeat for several."
RUNS = Annotated[list[str], typer.Option("--ckpt", metavar="RUN", help=RUNS_HELP)]
FORMAT = Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")]
RATE = Annotated[
    float | None,
    typer.Option("--rate", metavar="GFLOPS", help="GFLOP per second to reckon with, instead of measuring."),
]
#: A larger rate than any machine's, in GFLOP per second.
FASTEST = 1e9
#: Parameters of experiments that are no option: what they examine, and where they say how far they are.
EXAMINED = ("refs", "runs", "progress")
#: Names in their annotations that only a type checker knows.
TYPES_ALONE = {"Unpack": type}


@dataclass(frozen=True, kw_only=True)
class ImportOptions(CommonOptions):
    """Tasks that a file of the user's brings."""

    import_path: Annotated[
        Path | None, typer.Option("--import", metavar="FILE.py", help="Import a file that registers tasks.")
    ] = None

    def __post_init__(self) -> None:
        if self.import_path is not None:
            check_file(self.import_path, "--import")

    def import_tasks(self) -> None:
        if self.import_path is not None:
            import_file(self.import_path)


@dataclass(frozen=True, kw_only=True)
class PrintingOptions(ImportOptions):
    """Where rows are printed."""

    format: FORMAT = "table"

    def __post_init__(self) -> None:
        check_choice("--format", self.format, FORMATS)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class ResultOptions(PrintingOptions):
    """Where a result goes."""

    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write parquet, csv and json files there.")
    ] = None
    plot: Annotated[bool, typer.Option("--plot", help="Write an HTML page with a figure.")] = False
    plot_format: Annotated[
        str | None,
        typer.Option(
            "--plot-format", metavar="FORMAT", help="As --plot, as pictures: png or svg.", show_default="html"
        ),
    ] = None

    @property
    def plot_as(self) -> str | None:
        """Returns one of ``PLOT_FORMATS``; ``None`` for no figure."""
        return self.plot_format or ("html" if self.plot else None)

    def check(self, name: str) -> None:
        """Refuses, before slow work, files that could not be written after it."""
        if self.plot_format is not None:
            check_choice("--plot-format", self.plot_format, PLOT_FORMATS)
        check_targets(name, self.out, self.plot_as)

    def show(self, measure: Callable[[Progress | None], Result], metric: str | None = None) -> None:
        """Measures, prints and writes the result."""
        if self.plot_as in PICTURES:
            # Pictures that nothing here can draw are refused before anything is measured.
            from circuits.figures.export import check_exporter

            check_exporter()
        with progress_line(self.quiet) as progress:
            result = measure(progress)
        emit(result, self.format, self.out, self.plot_as, self.quiet, metric)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(ImportOptions):
    """What is trained: a task's model, by a preset and what overrides it."""

    task: Annotated[str, typer.Argument(metavar="TASK", help="A task; interp-run tasks lists them.")]
    preset: Annotated[str, typer.Option("--preset", help="cpu, reference or paper.")] = "cpu"
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="As in train.steps=1000, task.n=5, model.d_model=64. Repeat."
        ),
    ] = field(default_factory=list)
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu"

    def __post_init__(self) -> None:
        check_written_device(self.device)
        super().__post_init__()
        parse_settings(self.settings)

    def resolve(self) -> Resolved:
        """Returns the whole configuration, once tasks of the user's own are known.

        Raises:
            UserError: for a task, a preset or a setting that there is not.
        """
        from interp_tasks.training.config import resolve_config

        self.import_tasks()
        return resolve_config(self.task, self.preset, parse_settings(self.settings))


@dataclass(frozen=True, kw_only=True)
class DrawnOptions:
    """How many examples, by which seed, on which device."""

    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", help="Examples; every row with --tokens.", show_default="256"),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Draws the examples, resamples and intervals.")] = 0
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")] = "cpu"

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_seed(self.seed)
        check_written_device(self.device)

    def given(self, progress: Progress | None = None) -> Options:
        """Returns the options as an experiment's function takes them."""
        return {"progress": progress, "samples": self.samples, "seed": self.seed, "device": self.device}


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(DrawnOptions):
    """Which examples of which task, or which tokens."""

    split: Annotated[
        str | None, typer.Option("--split", help="train, validation or test.", show_default="test")
    ] = None
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="Task, for a checkpoint that names none.")
    ] = None
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of --task, as in task.n=4. Repeatable."),
    ] = field(default_factory=list)
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE.npy", help="Run on these tokens, an int array (batch, pos)."),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Run on these texts: CSV or JSON Lines with columns clean, corrupted, answer, wrong.",
        ),
    ] = None

    def given(self, progress: Progress | None = None) -> Options:
        """Returns the options as an experiment's function takes them, once tasks of the user's own are known."""
        if self.task is not None:
            check_task_name(self.task)
        if self.tokens is not None:
            check_file(self.tokens, "--tokens")
        if self.prompts is not None:
            check_file(self.prompts, "--prompts")
        config = task_config(self.task, self.settings)
        more: Options = {
            "split": self.split,
            "task": self.task,
            "task_config": config,
            "tokens": self.tokens,
            "prompts": self.prompts,
        }
        return {**super().given(progress), **more}


def experiment_command(path: str, experiment: Experiment) -> TyperCommand:
    """Returns the command of an experiment; its options are the parameters of its function and the shared ones.

    A parameter without ``typer.Option`` in its annotation is for Python alone.
    """
    signature = inspect.signature(experiment.function, eval_str=True, locals=TYPES_ALONE).parameters
    parameters, converters = own_options(signature.values())
    of_runs = "runs" in signature
    if of_runs:
        parameters.append(option("ckpt", RUNS))
    else:
        parameters.append(ref_option(signature["refs"].default is not inspect.Parameter.empty))
    of_metrics = not of_runs and experiment.compares_metrics
    if of_metrics:
        parameters.append(option("metric", METRIC, None))
    if any(each.kind is each.VAR_KEYWORD for each in signature.values()):
        parameters.append(option("examples", DrawnOptions if of_runs else ExampleOptions))
    parameters.append(option("output", ResultOptions))

    def call(
        ckpt: list[str], output: ResultOptions, examples: DrawnOptions | None = None, **own: Any
    ) -> None:
        # Where an experiment compares no metrics, an option of that name is its own.
        metric = own.pop("metric", None) if of_metrics else None
        output.check(experiment.name)
        output.import_tasks()
        if of_runs:
            find_runs(ckpt)
        examined = ckpt if of_runs else resolved_refs(experiment, ckpt, examples, metric)

        def measure(progress: Progress | None) -> Result:
            shared: Any = {} if examples is None else examples.given(progress)
            return EXPERIMENTS[experiment.name].function(examined, **converted(own, converters), **shared)

        output.show(measure, metric)

    call.__doc__ = experiment.function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may carry one
    made = command_of(path, call)
    if experiment.samples is not None:
        (samples,) = (each for each in made.params if each.name == "samples")
        samples.show_default = str(experiment.samples)  # type: ignore[attr-defined]  # of an option, which this is
    return made


METRIC = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="Rows of this metric, or all.",
        show_default="the task's own; in json, csv and files all",
    ),
]


def option(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def ref_option(may_be_left_out: bool) -> inspect.Parameter:
    """Returns ``--ckpt REF``."""
    if not may_be_left_out:
        return option("ckpt", Annotated[list[str], typer.Option("--ckpt", metavar="REF", help=REF_HELP)])
    shown = typer.Option("--ckpt", metavar="REF", help=REF_HELP, show_default="none, with --task")
    return option("ckpt", Annotated[list[str], shown], [])


def own_options(
    parameters: Iterable[inspect.Parameter],
) -> tuple[list[inspect.Parameter], dict[str, Callable[[Any], Any]]]:
    """Returns the options among an experiment's parameters, and what converts the values of some.

    An annotation is ``Annotated[TYPE, typer.Option(...), CLI_TYPE, CONVERTER]``. ``CLI_TYPE`` is what the command line
    has where that is not ``TYPE`` (Typer takes no ``str | Sequence[str]``); ``CONVERTER`` makes of it what the function
    takes. Both may be left out.
    """
    options, converters = [], {}
    for parameter in parameters:
        if parameter.name in EXAMINED or get_origin(parameter.annotation) is not Annotated:
            continue
        type_, *marks = get_args(parameter.annotation)
        shown = next(mark for mark in marks if isinstance(mark, OptionInfo))
        types = [mark for mark in marks if isinstance(mark, (type, GenericAlias, UnionType))]
        others = [mark for mark in marks if callable(mark) and mark not in types and mark is not shown]
        if others:
            converters[parameter.name] = others[0]
        type_ = types[0] if types else type_
        options.append(option(parameter.name, Annotated[type_, shown], as_written(parameter.default, type_)))
    return options, converters


def as_written(default: Any, type_: Any) -> Any:
    """Returns a function's default as the command line would write it."""
    if default is inspect.Parameter.empty:
        return default
    if get_origin(type_) is list:
        return [default] if isinstance(default, str) else list(default or ())
    return ",".join(map(str, default)) if type_ is str and isinstance(default, (tuple, list)) else default


def converted(own: Mapping[str, Any], converters: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Returns values as the function takes them; a list that is not given is left out."""
    return {
        name: converters[name](value) if name in converters and value is not None else value
        for name, value in own.items()
        if value != []
    }


def resolved_refs(
    experiment: Experiment, ckpt: list[str], drawn: DrawnOptions | None, metric: str | None
) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints that an experiment is called on, resolved once; refuses a metric that none has."""
    assert drawn is not None
    examples = Examples.of(drawn.given())
    refs = resolve_refs(ckpt, examples) if ckpt or examples.task is None else []
    if metric not in (None, "all") and examples.tokens is None and experiment.judged_by_task:
        check_metric(metric, refs, examples)
    return refs


def check_metric(metric: str, refs: Sequence[ResolvedCheckpoint], examples: Examples) -> None:
    """Refuses a metric that no task measures, before anything is measured.

    Raises:
        UserError: with the closest that there is.
    """
    from interp_tasks.measurement.table import plain_metric

    if examples.prompts is not None:
        check_choice("--metric", plain_metric(metric), PROMPT_METRICS)
        return
    own = examples.own_task()
    wholes = [own] if own is not None else [task_of(each) for each in refs]
    tasks = dict.fromkeys(part for whole in wholes for part in (whole.parts() or {"": whole}).values())
    names = list(dict.fromkeys(name for task in tasks for name in task.metric_names))
    more = {name for task in tasks for name in getattr(task, "property_names", ())}
    # A task of the user's own need not say what its metrics are called.
    if all(task.metric_names for task in tasks) and plain_metric(metric) not in {*names, *more}:
        raise unknown("--metric", metric, names, "metrics")


def check_rate(rate: float | None) -> None:
    """Refuses a rate that no machine has."""
    if rate is not None and not 0 < rate < FASTEST:
        raise UserError(
            f"--rate {rate:g}: give GFLOP per second, more than 0 and below {FASTEST:g}, such as 20"
        )
