"""The checkpoints that an experiment examines, each with its task and the examples it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypedDict

from circuits.errors import prefixed
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
#: Fields of a model's config that checkpoints must share for one to have weights or activations of the other.
ARCHITECTURE = (
    *(
        "n_layers",
        "n_heads",
        "n_key_value_heads",
        "d_model",
        "d_head",
        "d_mlp",
        "d_vocab",
        "d_vocab_out",
        "n_ctx",
    ),
    *("act_fn", "attn_only", "normalization_type", "attention_dir", "positional_embedding_type"),
)
#: Arguments of experiments that are gone, and what there is instead.
GONE = {
    "queries": "it is positions= now",
    "each_position": "circuits.probe.linear takes positions=, one call for each",
    **dict.fromkeys(("intercept", "ridge", "shuffles"), "circuits.probe.linear has it"),
    **dict.fromkeys(("heads", "positions"), "of probe, circuits.probe.linear has it"),
    "keys": "rule= chooses key frequencies",
    "kinds": "order follows all quantities",
    "answers": "all of the task's are measured",
    "every": "frequencies of little variance and no neurons are one row",
    "threshold": "circuits.patterns.classify has it",
    "start": "ways are counted from the plateau",
    "shift": "entries move by 0.1",
    "vary": "ood has it",
    "untrained": "untrained models always stand beside",
    "rank_by": "metric= ranks, or the task's first metric that has a gradient",
}


class Options(TypedDict, total=False):
    """The keyword arguments that every experiment takes: the fields of :class:`Examples`."""

    samples: int | None
    seed: int
    split: str | None
    task: Any
    task_config: Mapping[str, Any]
    tokens: Any
    prompts: Any
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
    """Which examples every checkpoint of one command sees, and where it is run.

    Attributes:
        samples: how many (``None``: 256 of a task, every row of ``tokens``).
        seed, split: of the task's sample; the seed also draws resamples and intervals.
        task: a task, or the name of one, for checkpoints that name none (or to use instead of theirs).
        task_config: settings of a task given by name.
        tokens: int array ``[batch pos]``, or the ``.npy`` file of one, to run on in place of a task's.
        prompts: a file of prompts and answers, as ``circuits.read_prompts`` reads it, to run on in place of a task's.
        device: such as ``"cuda:1"``.
        progress: called as progress(done, total, what).
    """

    samples: int | None = None
    seed: int = 0
    split: str = "test"
    task: str | Task | None = None
    task_config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Any = None
    prompts: str | Path | None = None
    device: str = "cpu"
    progress: Progress | None = None

    @classmethod
    def of(cls, options: Options) -> Examples:
        """Returns the examples that an experiment's options ask for.

        Raises:
            TypeError: for an option there is not.
            UserError: for a split of tokens, and for an argument that is gone.
        """
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        for name in given.keys() & GONE.keys():
            raise UserError(f"no argument {name}=; {GONE[name]}")
        if unknown := given.keys() - Options.__annotations__.keys():
            raise TypeError(f"no option {unknown.pop()!r}: options are {', '.join(Options.__annotations__)}")
        own = [f"--{name}" for name in ("tokens", "prompts") if name in given]
        if own and "split" in given:
            raise UserError(
                f"--split chooses among a task's examples, and {own[0]} are your own: leave one out"
            )
        if len(own) == 2:
            raise UserError("give --tokens or --prompts, not both")
        return cls(**given)

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
        if self.prompts is not None and not Path(self.prompts).is_file():
            raise UserError(f"cannot read {self.prompts}: no such file")
        if self.task is not None and self.prompts is not None:
            raise UserError("give --task or --prompts, not both: prompts have answers of their own")
        if self.task is not None and self.tokens is not None:
            raise UserError(
                "give --task or --tokens, not both: tokens of your own have no targets to compare with"
            )
        if self.task_config and not isinstance(self.task, str):
            raise UserError("--set here configures the task that --task NAME names: give --task too")

    def describe(self) -> dict[str, Any]:
        own = self.tokens is not None or self.prompts is not None
        prompts = {} if self.prompts is None else {"prompts": str(self.prompts)}
        tokens = str(self.tokens) if isinstance(self.tokens, (str, Path)) else type(self.tokens).__name__
        return {
            "samples": self.samples or (None if own else DEFAULT_SAMPLES),
            "seed": self.seed,
            "split": None if own else self.split,
            "task": getattr(self.task, "name", self.task),
            "task_config": dict(self.task_config),
            "tokens": None if self.tokens is None else tokens,
            **prompts,
            "device": self.device,
        }

    def own_task(self) -> Task | None:
        """Returns the task that is used in place of the checkpoints' own; ``None`` where none was given."""
        if not isinstance(self.task, str):
            return self.task
        from tasks import get

        return get(self.task, **self.task_config)

    def sample(self, task: Task) -> Batch:
        """Returns the examples of a task, checked."""
        from tasks.checks import checked_sample

        split: Any = self.split
        return checked_sample(task, self.samples or DEFAULT_SAMPLES, self.seed, split)

    def own_tokens(self) -> Tensor | None:
        """Returns the first ``samples`` rows of the tokens ``[batch pos]`` that were given."""
        if self.tokens is None:
            return None
        import numpy
        import torch

        source, tokens = "tokens", self.tokens
        if isinstance(tokens, (str, Path)):
            source = str(tokens)
            tokens = read_npy(source, "--tokens")
        array = numpy.asarray(tokens)
        if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
            raise UserError(
                f"{source}: expected whole numbers [batch pos], got {array.dtype} {list(array.shape)}"
            )
        rows = numpy.ascontiguousarray(array[: self.samples], dtype=numpy.int64)
        return torch.from_numpy(rows).to(self.device)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """One checkpoint with its examples; ``task`` and ``batch`` are ``None`` where it runs on bare tokens.

    Of a mixture there is one for each of the task's ``parts()``, with that part as its task.

    Attributes:
        sizes: the configuration of its model, as ``model.cfg`` has it: ``n_layers``, ``n_heads`` and so on.
        labels: the columns that all its rows share.
        loaded: the checkpoint; ``None`` until all are checked, before the first is measured.
    """

    stored: ResolvedCheckpoint
    sizes: Any
    task: Task | None
    batch: Batch | None
    tokens: Any  # [batch pos], or circuits.Prompts
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
        return self.stored.ref

    @property
    def seed(self) -> int:
        """The seed of the examples, which draws everything else as well."""
        return int(self.labels["seed"])

    def shown(self, batch: Batch) -> LoadedCheckpoint:
        """Returns the checkpoint with other examples of its task."""
        return replace(self, batch=batch, tokens=batch.tokens)


#: What experiments take: REFs, or checkpoints that are resolved already.
Refs = str | Path | Sequence[str] | Sequence[ResolvedCheckpoint]


def labelled(refs: Refs) -> list[ResolvedCheckpoint]:
    """Returns every checkpoint that REFs name, each once; those that are resolved are kept as they are.

    Rows are labelled with the REF as it was written where that names one checkpoint (``RUN@pre`` says more
    than the step it stands for, which has a column of its own), else with the REF of exactly this checkpoint.

    Raises:
        UserError: for a REF that names nothing.
    """
    found: dict[Path, ResolvedCheckpoint] = {}
    for ref in [refs] if isinstance(refs, (str, Path)) else refs:
        resolved = [ref] if isinstance(ref, ResolvedCheckpoint) else resolve(ref)
        if len(resolved) == 1 and not isinstance(ref, ResolvedCheckpoint):
            resolved = [replace(resolved[0], label=str(ref))]
        for each in resolved:
            found.setdefault(each.path, each)
    return list(found.values())


def resolve_refs(refs: Refs, examples: Examples) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints to examine, labelled and unloaded; see :func:`labelled`.

    Raises:
        UserError: for none, for a REF that names nothing, for a checkpoint without a task where one is needed.
    """
    found = labelled(refs)
    if not found:
        raise UserError("no checkpoint: give --ckpt REF, such as zoo:matrix-completion-7x7@post or RUN@last")
    if examples.task is None and examples.tokens is None and examples.prompts is None:
        for each in found:
            if each.meta["task"] is None:
                raise UserError(
                    f"{each.label} names no task: say --task NAME, --prompts FILE with texts and answers, or --tokens "
                    "FILE.npy with an int array (batch, pos)"
                )
    return found


def one_source(source: str) -> ResolvedCheckpoint:
    """Returns the one checkpoint that ``--source`` names, unloaded.

    Raises:
        UserError: where it names none or several.
    """
    found = labelled(source)
    if len(found) > 1:
        raise UserError(
            f"--source {source} names {len(found)} checkpoints, from {found[0].ref} to {found[-1].ref}: name one"
        )
    return found[0]


def check_architecture(
    sources: Sequence[ResolvedCheckpoint], receivers: Sequence[ResolvedCheckpoint]
) -> None:
    """Refuses sources of weights or activations that are not of the architecture of every receiver.

    Raises:
        UserError: naming the first field in which they differ.
    """
    for source in sources:
        for each in receivers:
            theirs, own = source.meta["model"], each.meta["model"]
            for name in ARCHITECTURE:
                if theirs.get(name) != own.get(name):
                    raise UserError(
                        f"--source {source.label} is of another architecture than {each.label}: its {name} is "
                        f"{theirs.get(name)}, not {own.get(name)}"
                    )


def subjects(
    refs: Refs, examples: Examples, check: Callable[[LoadedCheckpoint], object] | None = None
) -> Iterator[LoadedCheckpoint]:
    """Loads the checkpoints one after the other, each with its examples.

    Two checkpoints of equal tasks get the same batch; the task decides what a seed draws.

    Args:
        check: refuses what an experiment cannot do with a checkpoint; asked of all before the first is loaded.

    Raises:
        UserError: for a checkpoint without a task where none was given, or examples it cannot take.
        TaskError: for a task that does not fit the model.
    """
    found = resolve_refs(refs, examples)
    place = {each.path: at for at, each in enumerate(found)}
    unloaded = with_examples(found, examples)
    for each in unloaded:
        if check is not None:
            with prefixed(each.stored.label):
                check(each)
    from interp_tasks.checkpoints.load import load_resolved

    own_task = examples.own_task()
    loaded: Checkpoint | None = None
    for each in unloaded:
        if loaded is None or loaded.path != each.stored.path:
            if examples.progress is not None:
                examples.progress(place[each.stored.path], len(found), each.stored.label)
            loaded = None
            loaded = load_resolved(each.stored, examples.device)
            if own_task is not None:
                own_task.check_model(loaded.model)
        yield replace(each, loaded=loaded)


def with_examples(found: Sequence[ResolvedCheckpoint], examples: Examples) -> list[LoadedCheckpoint]:
    """Returns every checkpoint with its task and examples, none of them loaded; a mixture for each of its parts.

    Raises:
        UserError, TaskError: for a checkpoint without a task, or whose model cannot take the examples.
    """
    from tasks import Task

    check_device(examples.device)
    own_tokens, own_task = examples.own_tokens(), examples.own_task()
    batches: dict[Task, Batch] = {}
    prompted: dict[Path, Task] = {}
    unloaded = []
    for each in found:
        sizes = sizes_of(each)
        labels = {"run": each.run_name, "ref": each.label, "step": each.step, "seed": examples.seed}
        if own_tokens is not None:
            check_tokens_fit(own_tokens, sizes, each.ref)
            unloaded.append(LoadedCheckpoint(each, sizes, None, None, own_tokens, labels | {"split": None}))
            continue
        if examples.prompts is not None:
            from interp_tasks.measurement.prompts_task import prompts_task

            run = each.run_path or each.path
            if run not in prompted:
                prompted[run] = prompts_task(examples.prompts, each)
            task, batch = prompted[run], prompted[run].sample(examples.samples, examples.seed)
            unloaded.append(
                LoadedCheckpoint(each, sizes, task, batch, batch.tokens, labels | {"split": None})
            )
            continue
        whole = own_task or task_of(each)
        if type(whole).check_model is Task.check_model:
            # What a task of the user's own asks of a model shows when there is one.
            whole.check_model(SimpleNamespace(cfg=sizes))
        for part, task in (whole.parts() or {"": whole}).items():
            if task not in batches:
                batches[task] = examples.sample(task).to(examples.device)
            batch, ref = batches[task], f"{each.label} ({part})" if part else each.label
            shared = {**labels, "ref": ref, "split": examples.split}
            unloaded.append(LoadedCheckpoint(each, sizes, task, batch, batch.tokens, shared))
    return unloaded


def sizes_of(stored: ResolvedCheckpoint) -> Any:
    """Returns the configuration of a stored model, with attributes as ``model.cfg`` has them."""
    return SimpleNamespace(**stored.meta["model"])


def trained_on(stored: ResolvedCheckpoint, task: Task | None) -> bool:
    """Tells whether a checkpoint says that it was trained on a task, or on a mixture of which the task is a part.

    Of imported weights the task may be known, and which of its inputs they were trained on not.
    """
    own, run = stored.task, stored.run_path
    if own is None or task not in (own, *own.parts().values()):
        return False
    imported = {} if run is None else read_run(run).get("imported", {})
    return not imported or bool(imported["own_split"])


def task_of(stored: ResolvedCheckpoint) -> Task:
    """Returns the task that a checkpoint names.

    Raises:
        UserError: where there is none.
    """
    from interp_tasks.checkpoints.meta import no_task

    if stored.task is None:
        raise no_task(stored.meta, stored.ref)
    return stored.task


def read_npy(source: str, option: str) -> Any:
    """Returns the array of an ``.npy`` file.

    Raises:
        UserError: naming the file, for one that cannot be read.
    """
    import numpy

    check_file(Path(source), option)
    try:
        return numpy.load(source, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise UserError(f"{source} is not an .npy file of plain numbers (numpy.save makes one)") from None


def check_tokens_fit(tokens: Tensor, sizes: Any, ref: str) -> None:
    if tokens.shape[1] > sizes.n_ctx:
        raise UserError(f"tokens have {tokens.shape[1]} positions, {ref} takes at most {sizes.n_ctx}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= sizes.d_vocab:
        raise UserError(f"token ids run from {low} to {high}, {ref} knows 0 to {sizes.d_vocab - 1}")


def by_run(found: Sequence[ResolvedCheckpoint]) -> dict[str, list[ResolvedCheckpoint]]:
    """Returns the checkpoints of each run by ascending step; one outside any run counts as a run."""
    runs: dict[str, list[ResolvedCheckpoint]] = {}
    for one in found:
        runs.setdefault(str(one.run_path or one.path), []).append(one)
    return {run: sorted(several, key=lambda one: one.step) for run, several in runs.items()}


def in_runs(runs: Mapping[str, Sequence[ResolvedCheckpoint]]) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints of some runs, run by run, each labelled with the REF of exactly it."""
    return [replace(one, label=one.ref) for several in runs.values() for one in several]


def run_of(subject: LoadedCheckpoint) -> str:
    """Returns the name of a checkpoint's run, as in :func:`by_run`."""
    return str(subject.stored.run_path or subject.stored.path)
