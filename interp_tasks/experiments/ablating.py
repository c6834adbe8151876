"""What attention heads are for: change them, and see which metrics move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments.columns import tidy
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.specifications import (
    EACH,
    MODES,
    check_choice,
    check_heads,
    check_keys,
    check_queries,
    intervention_name,
)
from interp_tasks.experiments.subjects import Examples, Progress, Subject, check_refs, subjects

if TYPE_CHECKING:
    import pandas

    from circuits import Head


def ablation(
    refs: str | Sequence[str],
    heads: str | Sequence[Any] = "all",
    mode: str = "uniform",
    keys: str | Sequence[int] | None = None,
    queries: str | Sequence[int] = "all",
    *,
    samples: int | None = None,
    seed: int = 0,
    split: str = "test",
    task: Any = None,
    task_config: dict[str, Any] | None = None,
    tokens: Any = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Result:
    """Ablate attention heads of checkpoints and compare with the unedited model on the same examples.

    Args:
        refs: one or several REFs; all see the same examples.
        heads: ``"all"``, ``"each"`` (a row per head) or a spec such as ``"0.1+2.3-5"``; a list: a row each.
        mode: ``uniform`` attention, the ``mean_pattern``, or the heads' output ``zero``, its ``mean``, or
            that of another example (``resample``). Means and resamples are over the examples evaluated.
        keys: with ``uniform``, attend uniformly to these positions only.
        queries: edit only here: positions, or a boolean mask of the task's examples by name
            (``"hidden"``, ``"observed"``).
        samples, seed, split, task, task_config, tokens: see :class:`Examples`.

    Returns:
        A :class:`Result`; its ``frame`` has a row for each checkpoint, variant and metric. The metrics are
        the task's, or for bare tokens the distance of the output from the unedited one.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    specs = [heads] if isinstance(heads, str) or is_pairs(heads) else list(heads)
    if not specs:
        raise UserError("--heads: nothing to ablate; write all, each, or heads such as 0.1")
    specs = [check_heads(spec) if isinstance(spec, str) else spec for spec in specs]
    check_choice("--mode", mode, MODES)
    keys = check_keys(keys, mode)
    where = check_queries(queries) if isinstance(queries, str) else tuple(queries)
    examples = Examples(samples, seed, split, task, task_config or {}, tokens)
    examples.check()
    named = check_refs(refs, examples)

    import pandas

    name = intervention_name(mode, keys, where)
    frames: list[pandas.DataFrame] = []
    for subject in subjects(refs, examples, device, progress):
        frame = ablate_subject(subject, specs, mode, keys, where, seed)
        frames.append(frame.assign(experiment="ablation", intervention=name, n_runs=1, **subject.labels))
    config = {
        "refs": [refs] if isinstance(refs, str) else list(refs),
        "checkpoints": [each.resolved.ref for each in named],
        "heads": [str(spec) for spec in specs],
        "mode": mode,
        "keys": keys,
        "queries": "all" if where is None else where,
        **examples.describe(),
        "device": device,
    }
    return Result("ablation", tidy(pandas.concat(frames, ignore_index=True)), config, notes(mode))


def is_pairs(heads: Any) -> bool:
    """Whether a list is one choice of heads, ``[(0, 1), (0, 2)]``, rather than a list of specs."""
    return bool(heads) and all(
        isinstance(head, tuple) and len(head) == 2 and all(isinstance(part, int) for part in head)
        for head in heads
    )


def ablate_subject(
    subject: Subject,
    specs: Sequence[Any],
    mode: str,
    keys: tuple[int, ...] | None,
    queries: str | tuple[int, ...] | None,
    seed: int,
) -> pandas.DataFrame:
    """The rows of one checkpoint."""
    from circuits import ablate, sweep

    where = query_mask(subject, queries) if isinstance(queries, str) else queries
    variants = {}
    for label, chosen in choices(specs, subject.checkpoint.model).items():
        if mode == "uniform":
            variants[label] = ablate.uniform(chosen, keys=keys, queries=where)
        elif mode == "mean_pattern":
            variants[label] = ablate.mean_pattern(chosen, reference=subject.tokens, queries=where)
        elif mode == "zero":
            variants[label] = ablate.zero(chosen, queries=where)
        elif mode == "mean":
            variants[label] = ablate.mean(chosen, reference=subject.tokens, queries=where)
        else:
            variants[label] = ablate.resample(chosen, source=subject.tokens, seed=seed, queries=where)
    task = subject.task
    result = sweep(
        subject.checkpoint.model,
        subject.tokens,
        variants,
        metric=None if task is None else task.metrics,
        batch=subject.batch,
        positions=None if task is None else task.read_positions,
        seed=seed,
    )
    frame: pandas.DataFrame = result.frame
    return frame


def choices(specs: Sequence[Any], model: Any) -> dict[str, tuple[Head, ...]]:
    """Row label -> heads, in the order asked for."""
    from circuits import heads

    found: dict[str, tuple[Head, ...]] = {}
    for spec in specs:
        if spec == EACH:
            found |= {str(head): (head,) for head in heads("all", model)}
        else:
            label = spec if isinstance(spec, str) else "+".join(f"{layer}.{head}" for layer, head in spec)
            found[label] = heads(spec, model)
    return found


def query_mask(subject: Subject, name: str) -> Any:
    """A boolean mask ``[batch pos]`` of the examples; ``observed`` is the complement of ``hidden``."""
    extras = {} if subject.batch is None else subject.batch.extras
    masks = {key: mask for key, mask in extras.items() if is_mask(mask, subject)}
    if "hidden" in masks:
        masks.setdefault("observed", ~masks["hidden"])
    if name not in masks:
        named = "".join(f"{key}, " for key in masks)
        raise UserError(
            f"--queries {name!r}: the examples of {subject.checkpoint.ref} have no such mask; "
            f"write all, {named}or positions such as 0,3"
        )
    return masks[name]


def is_mask(mask: Any, subject: Subject) -> bool:
    import torch

    return mask.dtype == torch.bool and mask.shape == subject.tokens.shape


def notes(mode: str) -> tuple[str, ...]:
    """What a reader must know to read the numbers."""
    said = ["Intervals: 95%, bootstrap over examples; effects are paired with the unedited model."]
    said.append("p adj.: sign-flip test, Holm's adjustment over the rows of one checkpoint and intervention.")
    if mode in ("mean_pattern", "mean", "resample"):
        said.append(f"The {mode.replace('_', ' ')} is taken over the examples evaluated.")
    return tuple(said)
