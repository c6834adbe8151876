"""Subjects of experiments: checkpoints, each with its task and the examples it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from interp_tasks.checkpoints import ResolvedCheckpoint, read_run, resolve
from interp_tasks.devices import check_device
from interp_tasks.errors import UserError
from interp_tasks.files import check_file
from interp_tasks.measurement.options import SPLITS, check_choice, check_samples, check_seed

if TYPE_CHECKING:
    from torch import Tensor

    from interp_tasks.checkpoints import Checkpoint
    from tasks import Batch, Task

DEFAULT_SAMPLES = 256
#: Called as progress(done, total, what is being done).
Progress = Callable[[int, int, str], None]


class Options(TypedDict, total=False):
    """The keyword arguments that every experiment takes.

    ``samples, seed, split, task, task_config, tokens`` say which examples, see :class:`Examples`.
    ``device``: where to run (default ``"cpu"``). ``progress``: called as progress(done, total, what).
    """

    samples: int | None
    seed: int
    split: str | None
    task: Any
    task_config: Mapping[str, Any]
    tokens: Any
    device: str
    progress: Progress | None


def check_has_task(experiment: str, options: Options) -> None:
    """Refuses tokens of the user's own, for an experiment that asks a task what they stand for.

    Raises:
        UserError: in one line.
    """
    if options.get("tokens") is not None:
        raise UserError(f"{experiment} needs a task: leave --tokens out, or give --task NAME instead")


@dataclass(frozen=True)
class Examples:
    """Describes the examples that every checkpoint of one command sees.

    Attributes:
        samples: how many (``None``: 256 of a task, every row of ``tokens``).
        seed, split: of the task's sample; the seed also draws resamples and intervals.
        task: a task, or the name of one, for checkpoints that name none (or to use instead of theirs).
        task_config: settings of a task given by name.
        tokens: int array ``[batch pos]``, or the ``.npy`` file of one, to run on in place of a task's.
    """

    samples: int | None = None
    seed: int = 0
    split: str = "test"
    task: str | Task | None = None
    task_config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Any = None

    @classmethod
    def of(cls, options: Options) -> Examples:
        """Returns the examples that an experiment's options ask for.

        Raises:
            TypeError: for an option there is not.
            UserError: for a split of tokens.
        """
        for name in options:
            if name not in Options.__annotations__:
                raise TypeError(f"no option {name!r}: options are {', '.join(Options.__annotations__)}")
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if "tokens" in given and "split" in given:
            raise UserError(
                "--split chooses among a task's examples, and --tokens are your own: leave one out"
            )
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def __post_init__(self) -> None:
        """Refuses whatever can be refused without importing torch.

        Raises:
            UserError: in one line.
        """
        check_samples(self.samples)
        check_seed(self.seed)
        check_choice("--split", self.split, SPLITS)
        if self.task is not None and not (isinstance(self.task, str) or hasattr(self.task, "check_model")):
            raise UserError(f"task is a task or the name of one, not {self.task!r}")
        if isinstance(self.tokens, (str, Path)) and not Path(self.tokens).exists():
            raise UserError(f"cannot read {self.tokens}: No such file or directory")
        if self.task is not None and self.tokens is not None:
            raise UserError(
                "give --task or --tokens, not both: tokens of your own have no targets to compare with"
            )
        if self.task_config and not isinstance(self.task, str):
            raise UserError("--set here configures the task that --task NAME names: give --task too")

    def describe(self) -> dict[str, Any]:
        task = self.task if isinstance(self.task, str) or self.task is None else self.task.name
        tokens = self.tokens if isinstance(self.tokens, (str, type(None))) else type(self.tokens).__name__
        if isinstance(self.tokens, Path):
            tokens = str(self.tokens)
        return {
            "samples": self.samples or (DEFAULT_SAMPLES if self.tokens is None else None),
            "seed": self.seed,
            "split": self.split if self.tokens is None else None,
            "task": task,
            "task_config": dict(self.task_config),
            "tokens": tokens,
        }


@dataclass(frozen=True)
class LabelledRef:
    """A checkpoint that is not loaded, and the label of its rows: what the user called it."""

    label: str
    resolved: ResolvedCheckpoint

    def load(self, device: str) -> Checkpoint:
        from interp_tasks.checkpoints.load import load_resolved

        return load_resolved(self.resolved, device)

    def __str__(self) -> str:
        return self.label if self.resolved.run_path is None else f"{self.label} (step {self.resolved.step})"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """One checkpoint with its examples; ``task`` and ``batch`` are ``None`` where it runs on bare tokens.

    A checkpoint of a mixture is a subject for each of the task's ``parts()``, with that part as its task.

    Attributes:
        sizes: the configuration of its model, as ``model.cfg`` has it: ``n_layers``, ``n_heads`` and so on.
        loaded: the checkpoint; ``None`` until all are checked, before the first is measured.
    """

    named: LabelledRef
    sizes: Any
    task: Task | None
    batch: Batch | None
    tokens: Tensor
    labels: Mapping[str, Any]
    loaded: Checkpoint | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        assert self.loaded is not None
        return self.loaded

    @property
    def model(self) -> Any:
        return self.checkpoint.model

    @property
    def name(self) -> str:
        """The REF of exactly this checkpoint."""
        return self.named.resolved.ref

    @property
    def seed(self) -> int:
        """The seed of the examples, which draws everything else as well."""
        return int(self.labels["seed"])


#: One whose ``loaded`` is ``None``, which checks are given.
PendingCheckpoint = LoadedCheckpoint


class ResolvedRefs(tuple[str, ...]):
    """REFs as written, with the checkpoints they resolve to, so that they are resolved only once.

    Attributes:
        named: the checkpoints, each once.
    """

    named: tuple[LabelledRef, ...]

    def __new__(cls, given: Sequence[str], named: Sequence[LabelledRef]) -> ResolvedRefs:
        made = super().__new__(cls, given)
        made.named = tuple(named)
        return made


def resolve_refs(refs: str | Sequence[str], examples: Examples) -> ResolvedRefs:
    """Resolves REFs to every checkpoint that they name, unloaded; a resolved one is kept as it is.

    Rows are labelled with the REF as it was written where that names one checkpoint (``RUN@pre`` says more
    than the step it stands for, which has a column of its own), else with the REF of exactly this checkpoint.

    Raises:
        UserError: for a REF that names nothing, for none given, for a checkpoint without a task where one is
            needed.
    """
    if isinstance(refs, ResolvedRefs):
        return refs
    given = [str(refs)] if isinstance(refs, (str, Path)) else [str(ref) for ref in refs]
    if not given:
        raise UserError("no checkpoint: give --ckpt REF, such as zoo:matrix-completion-7x7@post or RUN@last")
    named: dict[Path, LabelledRef] = {}
    for ref in given:
        resolved = resolve(ref)
        for checkpoint in resolved:
            named.setdefault(
                checkpoint.path, LabelledRef(ref if len(resolved) == 1 else checkpoint.ref, checkpoint)
            )
    if examples.task is None and examples.tokens is None:
        for each in named.values():
            if each.resolved.meta["task"] is None:
                raise UserError(
                    f"{each.label} names no task: say --task NAME, or --tokens FILE.npy with an int array "
                    "(batch, pos)"
                )
    return ResolvedRefs(given, list(named.values()))


def subjects(
    refs: str | Sequence[str],
    examples: Examples,
    device: str = "cpu",
    progress: Progress | None = None,
    check: Callable[[PendingCheckpoint], object] | None = None,
) -> Iterator[LoadedCheckpoint]:
    """Loads the checkpoints one after the other, each with its examples.

    Two checkpoints of equal tasks get the same batch; the task decides what a seed draws.

    Args:
        check: refuses what an experiment cannot do with a checkpoint; asked of all before the first is loaded.

    Raises:
        UserError: for a checkpoint without a task where none was given, or examples it cannot take.
        TaskError: for a task that does not fit the model.
    """
    named = resolve_refs(refs, examples).named
    planned = plan(named, examples, device)
    for each in planned:
        if check is not None:
            with named_if_several(each.named.label, len(named)):
                check(each)
    own_task = read_task(examples)
    loaded: Checkpoint | None = None
    for each in planned:
        if loaded is None or loaded.path != each.named.resolved.path:
            if progress is not None:
                progress(named.index(each.named), len(named), each.named.label)
            loaded = None
            loaded = each.named.load(device)
            if own_task is not None and examples.tokens is None:
                own_task.check_model(loaded.model)
        yield replace(each, loaded=loaded)


def plan(named: Sequence[LabelledRef], examples: Examples, device: str = "cpu") -> list[PendingCheckpoint]:
    """Returns every checkpoint with its task and its examples, none of them loaded; a mixture for each of its parts.

    Raises:
        UserError, TaskError: for a checkpoint without a task, or whose model cannot take the examples.
    """
    from types import SimpleNamespace

    from tasks import Task

    check_device(device)
    own_tokens = read_tokens(examples.tokens, examples.samples)
    own_task = read_task(examples)
    batches: dict[Task, Batch] = {}
    planned = []
    for each in named:
        sizes = SimpleNamespace(**each.resolved.meta["model"])
        labels = {
            "run": each.resolved.run_name,
            "ref": each.label,
            "step": each.resolved.step,
            "seed": examples.seed,
            "split": None if own_tokens is not None else examples.split,
        }
        if own_tokens is not None:
            check_tokens_fit(own_tokens, sizes, each.resolved.ref)
            planned.append(PendingCheckpoint(each, sizes, None, None, own_tokens.to(device), labels))
            continue
        checkpoint_task = own_task or task_of(each)
        if type(checkpoint_task).check_model is Task.check_model:
            # What a task of the user's own asks of a model shows when there is one.
            checkpoint_task.check_model(SimpleNamespace(cfg=sizes))
        for part, task in (checkpoint_task.parts() or {"": checkpoint_task}).items():
            if task not in batches:
                batches[task] = sample(task, examples).to(device)
            batch = batches[task]
            ref = f"{each.label} ({part})" if part else each.label
            planned.append(PendingCheckpoint(each, sizes, task, batch, batch.tokens, {**labels, "ref": ref}))
    return planned


def trained_on(named: LabelledRef, task: Task | None) -> bool:
    """Tells whether a checkpoint says that it was trained on a task, or on a mixture of which the task is a part.

    Of imported weights the task may be known, and which of its inputs they were trained on not.
    """
    stored, run = named.resolved.task, named.resolved.run_path
    if stored is None or task not in (stored, *stored.parts().values()):
        return False
    imported = {} if run is None else read_run(run).get("imported", {})
    return not imported or bool(imported["own_split"])


def tasks_of(named: Sequence[LabelledRef], examples: Examples) -> list[Task]:
    """Returns the tasks that checkpoints are examined on, each once, made without any model.

    Raises:
        UserError, TaskError: for a checkpoint without a task, or a configuration that a task refuses.
    """
    own_task = read_task(examples)
    wholes = [own_task] if own_task is not None else [task_of(each) for each in named]
    parts = [part for whole in wholes for part in (whole.parts() or {"": whole}).values()]
    return list(dict.fromkeys(parts))


def task_of(named: LabelledRef) -> Task:
    """Returns the task that a checkpoint names.

    Raises:
        UserError: where there is none.
    """
    from interp_tasks.checkpoints.meta import no_task

    if named.resolved.task is None:
        raise no_task(named.resolved.meta, named.resolved.ref)
    return named.resolved.task


@contextmanager
def named_if_several(label: str, count: int) -> Iterator[None]:
    """Puts a checkpoint's label before what ``circuits`` refuses inside, where there are several checkpoints.

    Raises:
        UserError: with the label before it.
        CircuitsError: of the only checkpoint.
    """
    from circuits.errors import CircuitsError

    try:
        yield
    except CircuitsError as error:
        if count == 1:
            raise
        raise UserError(f"{label}: {error}") from None


def sample(task: Task, examples: Examples) -> Batch:
    """Returns the examples of a task, checked."""
    from tasks.checks import checked_sample

    split: Any = examples.split
    return checked_sample(task, examples.samples or DEFAULT_SAMPLES, examples.seed, split)


def read_task(examples: Examples) -> Task | None:
    if not isinstance(examples.task, str):
        return examples.task
    from tasks import get

    return get(examples.task, **examples.task_config)


def read_tokens(tokens: Any, samples: int | None) -> Tensor | None:
    """Returns the first ``samples`` rows of tokens ``[batch pos]`` from an array, a tensor or an ``.npy`` file."""
    if tokens is None:
        return None
    import numpy
    import torch

    source = "tokens"
    if isinstance(tokens, (str, Path)):
        source = str(tokens)
        tokens = read_npy(source, "--tokens")
    array = numpy.asarray(tokens)
    if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
        raise UserError(
            f"{source}: expected whole numbers [batch pos], got {array.dtype} {list(array.shape)}"
        )
    return torch.from_numpy(numpy.ascontiguousarray(array[:samples], dtype=numpy.int64))


def read_npy(source: str, option: str) -> Any:
    """Returns the array of an ``.npy`` file.

    Raises:
        UserError: naming the file, for one that cannot be read.
    """
    import numpy

    check_file(Path(source), option)
    try:
        return numpy.load(source, allow_pickle=False)
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror or error}") from None
    except (ValueError, EOFError):
        raise UserError(f"{source} is not an .npy file of plain numbers (numpy.save makes one)") from None


def check_tokens_fit(tokens: Tensor, sizes: Any, ref: str) -> None:
    if tokens.shape[1] > sizes.n_ctx:
        raise UserError(f"tokens have {tokens.shape[1]} positions, {ref} takes at most {sizes.n_ctx}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= sizes.d_vocab:
        raise UserError(f"token ids run from {low} to {high}, {ref} knows 0 to {sizes.d_vocab - 1}")


def by_run(named: Sequence[LabelledRef]) -> dict[str, list[LabelledRef]]:
    """Returns the checkpoints of each run by ascending step; one outside any run counts as a run."""
    runs: dict[str, list[LabelledRef]] = {}
    for one in named:
        runs.setdefault(str(one.resolved.run_path or one.resolved.path), []).append(one)
    for several in runs.values():
        several.sort(key=lambda one: one.resolved.step)
    return runs


def in_runs(runs: Mapping[str, Sequence[LabelledRef]]) -> ResolvedRefs:
    """Returns the checkpoints of some runs, run by run, each labelled with the REF of exactly it."""
    named = [LabelledRef(one.resolved.ref, one.resolved) for several in runs.values() for one in several]
    return ResolvedRefs([one.label for one in named], named)


def run_of(subject: LoadedCheckpoint) -> str:
    """Returns the name of a subject's run, as in :func:`by_run`."""
    return str(subject.checkpoint.path.parent.parent if subject.checkpoint.run else subject.checkpoint.path)
