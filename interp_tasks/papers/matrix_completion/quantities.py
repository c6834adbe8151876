"""The quantities that ``order`` follows: each a function of a checkpoint that gives values by name, with resamples.

``[1 + draws]``, with the same resamples of examples at every checkpoint; ``[1]`` where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.embeddings import Tables
from interp_tasks.measurement.paired import read
from interp_tasks.measurement.subjects import LoadedCheckpoint

if TYPE_CHECKING:
    from interp_tasks.checkpoints import Checkpoint, ResolvedCheckpoint
    from interp_tasks.measurement.embeddings import Array

TOKENS_PER_PASS = 32768


@dataclass
class RunEnd:
    """The last checkpoint of a run, loaded on first use.

    Attributes:
        ref, device: of the checkpoint, and where it is loaded.
    """

    resolved: ResolvedCheckpoint
    device: str
    _checkpoint: Checkpoint | None = None
    _classes: Mapping[str, Any] | None = None

    def checkpoint(self) -> Checkpoint:
        from interp_tasks.checkpoints.load import load_resolved

        if self._checkpoint is None:
            self._checkpoint = load_resolved(self.resolved, self.device)
        return self._checkpoint

    def classes(self, subject: LoadedCheckpoint) -> Mapping[str, Any]:
        """Returns its heads by class, as ``attention`` finds them; those of no class left out."""
        from interp_tasks.measurement.heads.classes import classify_heads

        if self._classes is None:
            self._classes = {}
            if hasattr(subject.task, "attention_templates"):
                found = classify_heads(replace(subject, loaded=self.checkpoint()), positions=None)
                self._classes = {
                    name: heads for name, heads in found.groups().items() if name in found.possible
                }
        return self._classes


def pooled(sums: Any, counts: Any, seed: int) -> Array:
    """Returns Σsum / Σcount of per-example pairs, then of its resamples over examples."""
    import numpy as np

    from circuits.statistics import bootstrap, ratio
    from interp_tasks.measurement.paired import DRAWS

    total, count = (np.asarray(x, dtype=float)[None] for x in (sums, counts))
    value = ratio(total.sum(1), count.sum(1))
    return np.concatenate([value, bootstrap(total, count, seed, DRAWS)[:, 0]])


def judged(subject: LoadedCheckpoint, *edits: Any) -> dict[str, tuple[Array, Array]]:
    """Returns the task's metrics per example, under edits."""
    from circuits import run

    assert subject.task is not None
    output = run(subject.model, subject.tokens, *edits)
    return {name: read(metric) for name, metric in subject.task.metrics(output, subject.batch).items()}  # type: ignore[arg-type]


def metrics(subject: LoadedCheckpoint, end: RunEnd) -> dict[str, Array]:
    return {name: pooled(*values, subject.seed) for name, values in judged(subject).items()}


def ablation(subject: LoadedCheckpoint, end: RunEnd) -> dict[str, Array]:
    """Returns the change of the drop metric under uniform attention in all heads."""
    from circuits import ablate, heads

    assert subject.task is not None
    name = subject.task.drop_metric.name
    edited = judged(subject, ablate.uniform(heads("all", subject.model)))[name]
    gap = pooled(*edited, subject.seed) - pooled(*judged(subject)[name], subject.seed)
    return {f"effect of ablation on {name}": gap}


def embeddings(subject: LoadedCheckpoint, end: RunEnd) -> dict[str, Array]:
    from interp_tasks.papers.matrix_completion.arrangement import ALIGNMENT, EmbeddingTargets, of_tokens

    assert subject.task is not None
    targets = EmbeddingTargets(subject.task.token_values(), {})
    if len(targets.values) < 4:
        return {}
    last = Tables.of(end.checkpoint().model)
    return {
        "embedding alignment": of_tokens(targets, Tables.of(subject.model), last, subject.seed)[ALIGNMENT][1]
    }


def positions(subject: LoadedCheckpoint, end: RunEnd) -> dict[str, Array]:
    """Returns how far the position embeddings form clusters, by each axis of the grid of positions."""
    import numpy as np

    from interp_tasks.papers.matrix_completion.arrangement import EmbeddingTargets, distances, silhouette

    assert subject.task is not None
    axes = {axis.name: len(axis.values) for axis in subject.task.grid_axes() if axis.position is None}
    table = Tables.of(subject.model).positions
    cells = int(np.prod(list(axes.values())))
    if not axes or table is None:
        return {}
    targets, apart = EmbeddingTargets({}, axes), distances(table[:cells])
    return {
        f"silhouette of positions by {axis}": np.array([silhouette(apart, targets.labels(axis))])
        for axis, size in axes.items()
        if 1 < size < cells
    }


def attention(subject: LoadedCheckpoint, end: RunEnd) -> dict[str, Array]:
    """Returns the mean share of attention on its template, of the heads that end in each class."""
    import numpy as np
    import torch

    from circuits import cache
    from circuits.model.prompts import Prompts
    from circuits.patterns._templates import template_keys

    classes = end.classes(subject)
    if not classes:
        return {}
    assert subject.task is not None
    declared: Mapping[str, Any] = subject.task.attention_templates()  # type: ignore[attr-defined]
    batch, tokens = subject.batch, subject.tokens
    assert batch is not None
    sums: dict[str, list[Array]] = {name: [] for name in classes}
    counts: dict[str, list[Array]] = {name: [] for name in classes}
    size = max(1, TOKENS_PER_PASS // tokens.shape[1])
    for start in range(0, len(tokens), size):
        rows = slice(start, start + size)
        seen = cache(subject.model, tokens[rows], ["pattern"])
        for name, heads in classes.items():
            keys = template_keys(name, declared[name], batch[rows], rows, Prompts(tokens[rows])).to(
                tokens.device
            )
            has = keys.any(-1).expand(len(tokens[rows]), -1)
            shares = torch.stack(
                [
                    (seen[f"blocks.{head.layer}.attn.hook_pattern"][:, head.head] * keys).sum(-1)
                    for head in heads
                ],
                1,
            )
            sums[name].append((shares * has[:, None]).sum((1, 2)).double().cpu().numpy())
            counts[name].append(has.sum(1).double().cpu().numpy() * len(heads))
    return {
        f"attention of {name} heads": pooled(
            np.concatenate(sums[name]), np.concatenate(counts[name]), subject.seed
        )
        for name in classes
    }


def probe(subject: LoadedCheckpoint, end: RunEnd) -> dict[str, Array]:
    """Returns the first target that the task declares, read after the last layer."""
    import numpy as np

    from interp_tasks.measurement.probes import ProbeSettings, probed

    assert subject.task is not None
    assert subject.batch is not None
    declared = subject.task.probe_targets(subject.batch)
    if not declared.targets:
        return {}
    name = next(iter(declared.targets))
    last = subject.model.cfg.n_layers - 1
    settings = ProbeSettings.read(
        sites=f"resid_post.{last}",
        targets=name,
        heads=None,
        positions=None,
        each_position=False,
        intercept=False,
        ridge=None,
        folds=5,
        held_out=0.25,
        shuffles=1,
        untrained=False,
    )
    table = probed(subject, settings)
    split = "hidden" if "hidden" in declared.splits else "all"
    metric = "r2" if declared.targets[name].kind == "regression" else "accuracy"
    scores = table[(table["split"] == split) & (table["metric"] == metric)]["value"].to_numpy(dtype=float)
    split_text = f" ({split})" if split != "all" else ""
    return {f"probe of {name}{split_text}, {metric}": np.asarray(scores[:1])}


QUANTITIES: dict[str, Callable[[LoadedCheckpoint, RunEnd], dict[str, Array]]] = {
    "metrics": metrics,
    "ablation": ablation,
    "embeddings": embeddings,
    "positions": positions,
    "attention": attention,
    "probe": probe,
}
