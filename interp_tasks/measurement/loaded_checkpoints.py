"""The checkpoints that an experiment examines, each with its task and the examples it is shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from circuits.errors import prefix_circuits_errors
from interp_tasks.checkpoints import ResolvedCheckpoint, read_run, resolve
from interp_tasks.checkpoints.checkpoint_refs import resolve_one_ref
from interp_tasks.checkpoints.run_reader import check_names_task
from interp_tasks.devices import check_device
from interp_tasks.errors import UserError
from interp_tasks.measurement.options_and_examples import DEFAULT_SAMPLES, Examples

if TYPE_CHECKING:
    from torch import Tensor

    from tasks import Batch, Task

#: The source of activations that is another example.
RESAMPLE = "resample"
#: Fields of a model's config that checkpoints must share for one to have weights or activations of the other.
ARCHITECTURE = (
    "n_layers n_heads n_key_value_heads d_model d_head d_mlp d_vocab d_vocab_out n_ctx act_fn attn_only "
    "normalization_type attention_dir positional_embedding_type"
)


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


def declared_by_task(subject: LoadedCheckpoint, name: str, *given: Any) -> Mapping[str, Any]:
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
    known = {**declared_by_task(subject, "attention_moves", subject.batch, subject.seed)}
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
    refs: Refs, examples: Examples | None = None, unavailable_options: Collection[str] = ()
) -> list[ResolvedCheckpoint]:
    """Returns every checkpoint that REFs name, each once and unloaded; those that are resolved are kept as they are.

    Rows are labelled with the REF as it was written where that names one checkpoint (``RUN@pre`` says more
    than the step it stands for, which has a column of its own), else with the REF of exactly this checkpoint.

    Args:
        examples: which they are to see: where these are of their own tasks, all must name one.
        unavailable_options: options that the command lacks, which a refusal is not to name.
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
        check_names_task(each.meta, each.label, unavailable_options)
    return list(found.values())


def resolve_and_check_sources(
    source: str | Sequence[str], receivers: Sequence[ResolvedCheckpoint], single: bool = False
) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints that ``--source`` names, unloaded; they have the architecture of every receiver."""
    found = [resolve_one_ref(str(source), f"--source {source}")] if single else resolve_refs(source)
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
def load_source_model(source: ResolvedCheckpoint, device: str) -> Any:
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
            with prefix_circuits_errors(stored.label):
                check_sizes(stored.model_config, stored.ref)
    own_task = examples.given_task()
    unloaded = list(pair_with_examples(found, examples, own_task))
    if check is not None:
        for each in unloaded:
            with prefix_circuits_errors(each.stored.label):
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
    found: Sequence[ResolvedCheckpoint], examples: Examples, given_task: Task | None
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
        whole = given_task or each.task
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


def was_trained_on(stored: ResolvedCheckpoint, task: Task | None) -> bool:
    """Tells whether a checkpoint says that it was trained on a task, or on a mixture of which the task is a part.

    Of imported weights the task may be known, and which of its inputs they were trained on not.
    """
    own, run = stored.task, stored.run_path
    if own is None or task not in (own, *own.parts().values()):
        return False
    imported = {} if run is None else read_run(run).get("imported", {})
    return not imported or bool(imported["own_split"])


def check_tokens_fit(tokens: Tensor, sizes: Any, ref: str) -> None:
    if tokens.shape[1] > sizes.n_ctx:
        raise UserError(f"tokens have {tokens.shape[1]} positions, {ref} takes at most {sizes.n_ctx}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= sizes.d_vocab:
        raise UserError(f"token ids run from {low} to {high}, {ref} knows 0 to {sizes.d_vocab - 1}")


def checkpoints_by_run(found: Sequence[ResolvedCheckpoint]) -> dict[str, list[ResolvedCheckpoint]]:
    """Returns the checkpoints of each run by ascending step, each labelled with the REF of exactly it; one outside any
    run counts as a run.
    """
    runs: dict[str, list[ResolvedCheckpoint]] = {}
    for one in found:
        runs.setdefault(str(one.run_path or one.path), []).append(replace(one, label=one.ref))
    return {run: sorted(several, key=lambda one: one.step) for run, several in runs.items()}


def path_of_run(subject: LoadedCheckpoint) -> str:
    """Returns the name of a checkpoint's run, as in :func:`checkpoints_by_run`."""
    return str(subject.stored.run_path or subject.stored.path)
