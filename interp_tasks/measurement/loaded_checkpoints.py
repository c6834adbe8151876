"""The checkpoints that an experiment examines, each with its task and the examples it is shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from circuits.errors import prefix_error_messages
from interp_tasks.checkpoints import ResolvedCheckpoint, read_run, resolve
from interp_tasks.checkpoints.refs import resolve_one
from interp_tasks.checkpoints.run_files import check_names_task
from interp_tasks.devices import check_device
from interp_tasks.disk import check_file
from interp_tasks.errors import UserError
from interp_tasks.measurement.option_parsing import DEVICE, SEED, SPLITS, check_choice
from interp_tasks.setting_parsing import SEED_END, check_task_name, task_config

if TYPE_CHECKING:
    from torch import Tensor

    from tasks import Batch, Task

DEFAULT_SAMPLES = 256
#: The source of activations that is another example.
RESAMPLE = "resample"
#: Called as progress(done, total, what is being done).
Progress = Callable[[int, int, str], None]
#: Fields of a model's config that checkpoints must share for one to have weights or activations of the other.
ARCHITECTURE = (
    "n_layers n_heads n_key_value_heads d_model d_head d_mlp d_vocab d_vocab_out n_ctx act_fn attn_only "
    "normalization_type attention_dir positional_embedding_type"
)


class Options(TypedDict, total=False):
    """The keyword arguments of every experiment, and the options of its command: the fields of :class:`Examples`."""

    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", help="Examples; every row with --tokens.", show_default="256"),
    ]
    seed: SEED
    split: Annotated[
        str | None, typer.Option("--split", help="train, validation or test.", show_default="test")
    ]
    task: Annotated[
        Any,
        typer.Option("--task", metavar="NAME", help="Task, for a checkpoint that names none."),
        str | None,
    ]
    task_config: Annotated[
        Mapping[str, Any] | Sequence[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of --task, as in task.n=4. Repeatable."),
        list[str],
    ]
    tokens: Annotated[
        Any,
        typer.Option("--tokens", metavar="FILE.npy", help="Run on these tokens, an int array (batch, pos)."),
        Path | None,
    ]
    prompts: Annotated[
        Any,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Run on these texts: CSV or JSON Lines with columns clean, corrupted, answer, wrong.",
        ),
        Path | None,
    ]
    device: DEVICE
    progress: Progress | None


@dataclass(frozen=True)
class Examples:
    """Which examples every checkpoint of one command sees, and where it is run.

    Attributes:
        samples: how many (``None``: 256 of a task, every row of ``tokens``).
        seed, split: of the task's sample; the seed also draws resamples and intervals.
        task: a task, or the name of one, for checkpoints that name none (or to use instead of theirs).
        task_config: settings of a task given by name; texts, such as ``"n=4"``, are read as ``--set`` is.
        tokens: int array ``[batch pos]``, or the ``.npy`` file of one, to run on in place of a task's.
        prompts: a file of prompts and answers, as ``circuits.read_prompts`` reads it, to run on in place of a task's.
        of_task: whether examples are a task's, and no tokens or prompts of the user's own.
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
    of_task: bool = True
    device: str = "cpu"
    progress: Progress | None = None

    @classmethod
    def of(cls, options: Options) -> Examples:
        """Returns the examples that an experiment's options ask for, checked as far as that needs no torch."""
        if unknown := options.keys() - Options.__annotations__.keys():
            known = ", ".join(Options.__annotations__)
            raise UserError(f"no argument {unknown.pop()!r}; there are {known}, and its own")
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        # Tokens and prompts are examples of the user's own, without a task or with answers of theirs.
        chosen = [name for name in ("tokens", "prompts", "task", "split") if name in given]
        if len(chosen) > 1 and chosen[0] in ("tokens", "prompts"):
            raise UserError(f"give --{chosen[1]} or --{chosen[0]}, not both")
        task, config = given.get("task"), given.get("task_config", {})
        if isinstance(task, str):
            check_task_name(task)
        if not isinstance(config, Mapping):
            given["task_config"] = task_config(task, config)
        asked = cls(**given, of_task=not {"tokens", "prompts"} & given.keys())
        if asked.samples is not None and asked.samples < 1:
            raise UserError(f"--samples {asked.samples}: at least one example is needed")
        if not 0 <= asked.seed < SEED_END:
            raise UserError(f"--seed {asked.seed}: a seed is a whole number from 0 to {SEED_END - 1}")
        check_choice("--split", asked.split, SPLITS)
        if not (asked.task is None or isinstance(asked.task, str) or hasattr(asked.task, "check_model")):
            raise UserError(f"task is a task or the name of one, not {asked.task!r}")
        for name in ("tokens", "prompts"):
            if isinstance(file := given.get(name), (str, Path)):
                check_file(Path(file), f"--{name}")
        if asked.task_config and not isinstance(asked.task, str):
            raise UserError("--set here configures the task that --task NAME names: give --task too")
        return asked

    def describe(self) -> dict[str, Any]:
        prompts = {} if self.prompts is None else {"prompts": str(self.prompts)}
        tokens = str(self.tokens) if isinstance(self.tokens, (str, Path)) else type(self.tokens).__name__
        return {
            "samples": self.samples or (DEFAULT_SAMPLES if self.of_task else None),
            "seed": self.seed,
            "split": self.split if self.of_task else None,
            "task": getattr(self.task, "name", self.task),
            "task_config": dict(self.task_config),
            "tokens": None if self.tokens is None else tokens,
            **prompts,
            "device": self.device,
        }

    def given_task(self) -> Task | None:
        """Returns the task that is used in place of the checkpoints' own; ``None`` where none was given."""
        if not isinstance(self.task, str):
            return self.task
        from tasks import get

        return get(self.task, **self.task_config)

    def given_tokens(self) -> Tensor:
        """Returns the first ``samples`` rows of the tokens ``[batch pos]`` that were given."""
        import numpy
        import torch

        is_file = isinstance(self.tokens, (str, Path))
        array = numpy.asarray(read_npy(str(self.tokens), "--tokens") if is_file else self.tokens)
        if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
            source = self.tokens if is_file else "tokens"
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
        labels: the columns that all its rows share.
        seed: of the examples, which draws everything else as well.
        model: ``None`` until all that experiments refuse has been refused, at all checkpoints.
    """

    stored: ResolvedCheckpoint
    task: Task | None
    batch: Batch | None
    tokens: Any  # [batch pos], or circuits.Prompts
    labels: Mapping[str, Any]
    seed: int
    model: Any = None

    @property
    def name(self) -> str:
        """The REF of exactly this checkpoint."""
        return self.stored.ref

    def shown(self, batch: Batch) -> LoadedCheckpoint:
        """Returns the checkpoint with other examples of its task."""
        return replace(self, batch=batch, tokens=batch.tokens)


def declared_or_empty(subject: LoadedCheckpoint, name: str, *given: Any) -> Mapping[str, Any]:
    """Returns what a checkpoint's task declares; nothing where it declares none, or there are no pairs of examples.

    Args:
        given: the examples that are paired, and the seed.
    """
    declare = getattr(subject.task, name, None)
    return {} if declare is None or (given and len(subject.tokens) < 2) else dict(declare(*given))


def source_batch(subject: LoadedCheckpoint, source: str | None, usual: Sequence[str] = ()) -> Batch | None:
    """Returns the inputs, row by row, that a task calls a source: in ``attention_moves(batch, seed)`` or
    ``patch_sources(batch)``; ``None`` for another example of the batch.

    Args:
        source: ``"resample"``, or such a name; ``None``: the first of the ``usual`` that it declares.
    """
    task: Any = subject.task
    known = {**declared_or_empty(subject, "attention_moves", subject.batch, subject.seed)}
    known |= task.patch_sources(subject.batch) if hasattr(task, "patch_sources") else {}
    name = source or next((each for each in usual if each in known), RESAMPLE)
    if name == RESAMPLE:
        return None
    if name not in known:
        names = ", ".join([*known, RESAMPLE])
        raise UserError(
            f"--source {source}: {subject.name} has no such source; write a REF, or one of {names}"
        )
    batch: Batch = known[name].to(str(subject.tokens.device))
    return batch


#: What experiments take: REFs, or checkpoints that are resolved already.
Refs = str | Path | Sequence[str] | Sequence[ResolvedCheckpoint]


def resolve_refs(
    refs: Refs, examples: Examples | None = None, without: Collection[str] = ()
) -> list[ResolvedCheckpoint]:
    """Returns every checkpoint that REFs name, each once and unloaded; those that are resolved are kept as they are.

    Rows are labelled with the REF as it was written where that names one checkpoint (``RUN@pre`` says more
    than the step it stands for, which has a column of its own), else with the REF of exactly this checkpoint.

    Args:
        examples: which they are to see: where these are of their own tasks, all must name one.
        without: options that the command lacks, which a refusal is not to name.
    """
    found: dict[Path, ResolvedCheckpoint] = {}
    for ref in [refs] if isinstance(refs, (str, Path)) else refs:
        for each in [ref] if isinstance(ref, ResolvedCheckpoint) else resolve(ref):
            found.setdefault(each.path, each)
    if examples is None:
        return list(found.values())
    if not found:
        raise UserError("no checkpoint: give --ckpt REF, such as zoo:matrix-completion-7x7@post or RUN@last")
    for each in found.values() if examples.task is None and examples.of_task else ():
        check_names_task(each.meta, each.label, without)
    return list(found.values())


def resolve_compatible_sources(
    source: str | Sequence[str], receivers: Sequence[ResolvedCheckpoint], one: bool = False
) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints that ``--source`` names, unloaded; they have the architecture of every receiver."""
    found = [resolve_one(str(source), f"--source {source}")] if one else resolve_refs(source)
    for lender, each in product(found, receivers):
        theirs, own = lender.meta["model"], each.meta["model"]
        for name in ARCHITECTURE.split():
            if theirs.get(name) != own.get(name):
                raise UserError(
                    f"--source {lender.label} is of another architecture than {each.label}: its {name} is "
                    f"{theirs.get(name)}, not {own.get(name)}"
                )
    return found


@lru_cache(maxsize=1)
def source_model(source: ResolvedCheckpoint, device: str) -> Any:
    """Returns the model of a checkpoint that weights or activations come from; the last one is kept."""
    from interp_tasks.checkpoints.checkpoint import load_model

    return load_model(source, device)


def subjects(
    refs: Refs,
    examples: Examples,
    check: Callable[[LoadedCheckpoint], object] | None = None,
    check_sizes: Callable[[Any, str], object] | None = None,
) -> Iterator[LoadedCheckpoint]:
    """Loads the checkpoints one after the other, each with its examples.

    Two checkpoints of equal tasks get the same batch; the task decides what a seed draws.

    Args:
        check: refuses what an experiment cannot do with a checkpoint; asked of all before the first is loaded.
        check_sizes: refuses what a model of these sizes, called so, lacks, before anything slow is imported.
    """
    found = resolve_refs(refs, examples)
    if check_sizes is not None:
        for stored in found:
            with prefix_error_messages(stored.label):
                check_sizes(stored.model_config, stored.ref)
    own_task = examples.given_task()
    unloaded = list(pair_with_examples(found, examples, own_task))
    if check is not None:
        for each in unloaded:
            with prefix_error_messages(each.stored.label):
                check(each)
    from interp_tasks.checkpoints.checkpoint import load_model

    place, last, model = {each.path: at for at, each in enumerate(found)}, None, None
    for each in unloaded:
        if each.stored is not last:
            if examples.progress is not None:
                examples.progress(place[each.stored.path], len(found), each.stored.label)
            last, model = each.stored, None
            model = load_model(each.stored, examples.device)
            if own_task is not None:
                own_task.check_model(model)
        yield replace(each, model=model)


def pair_with_examples(
    found: Sequence[ResolvedCheckpoint], examples: Examples, own_task: Task | None
) -> Iterator[LoadedCheckpoint]:
    """Yields every checkpoint with its task and examples, none of them loaded; a mixture for each of its parts."""
    from tasks.base import Split, Task, checked_sample

    check_device(examples.device)
    own_tokens = None if examples.tokens is None else examples.given_tokens()
    split: Split = examples.split  # type: ignore[assignment]  # one of them, checked
    batches: dict[Task, Batch] = {}
    prompted: dict[Path, Task] = {}
    for each in found:
        labels = {"run": each.run_name, "ref": each.label, "step": each.step, "seed": examples.seed}
        labels["split"] = examples.split if examples.of_task else None
        if own_tokens is not None:
            check_tokens_fit(own_tokens, each.model_config, each.ref)
            yield LoadedCheckpoint(each, None, None, own_tokens, labels, examples.seed)
            continue
        if examples.prompts is not None:
            from interp_tasks.measurement.prompts_task import prompts_task

            run = each.run_path or each.path
            task = prompted[run] = prompted.get(run) or prompts_task(examples.prompts, each)
            batch = task.sample(examples.samples, examples.seed)
            yield LoadedCheckpoint(each, task, batch, batch.tokens, labels, examples.seed)
            continue
        whole = own_task or each.task
        assert whole is not None
        # What a task of the user's own asks of a model shows when there is one.
        if type(whole).check_model is Task.check_model:
            whole.check_model(SimpleNamespace(cfg=each.model_config))
        for part, task in (whole.parts() or {"": whole}).items():
            if task not in batches:
                drawn = checked_sample(task, examples.samples or DEFAULT_SAMPLES, examples.seed, split)
                batches[task] = drawn.to(examples.device)
            shared = {**labels, "ref": f"{each.label} ({part})" if part else each.label}
            yield LoadedCheckpoint(each, task, batches[task], batches[task].tokens, shared, examples.seed)


def trained_on(stored: ResolvedCheckpoint, task: Task | None) -> bool:
    """Tells whether a checkpoint says that it was trained on a task, or on a mixture of which the task is a part.

    Of imported weights the task may be known, and which of its inputs they were trained on not.
    """
    own, run = stored.task, stored.run_path
    if own is None or task not in (own, *own.parts().values()):
        return False
    imported = {} if run is None else read_run(run).get("imported", {})
    return not imported or bool(imported["own_split"])


def read_npy(source: str, option: str) -> Any:
    """Returns the array of an ``.npy`` file."""
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
    """Returns the checkpoints of each run by ascending step, each labelled with the REF of exactly it; one outside any
    run counts as a run.
    """
    runs: dict[str, list[ResolvedCheckpoint]] = {}
    for one in found:
        runs.setdefault(str(one.run_path or one.path), []).append(replace(one, label=one.ref))
    return {run: sorted(several, key=lambda one: one.step) for run, several in runs.items()}


def get_run_name(subject: LoadedCheckpoint) -> str:
    """Returns the name of a checkpoint's run, as in :func:`by_run`."""
    return str(subject.stored.run_path or subject.stored.path)
