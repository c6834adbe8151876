"""What attention heads attend to, and how far their attention moves when the input changes in one respect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments.head_edits import positions
from interp_tasks.experiments.measuring import Found, measure
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.specifications import check_queries
from interp_tasks.experiments.subjects import Options, Subject
from interp_tasks.reporting import Figure, Page

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from torch import Tensor
    from typing_extensions import Unpack

    from circuits.patterns import Classes, Maps, Movement, Scores

THRESHOLD = 0.5
#: The word for the queries whose output the task reads.
READ = "read"
#: What metrics of movement begin with; the rest is what was changed.
MOVED = "moved by "


@dataclass(frozen=True)
class AttentionResult(Result):
    """A :class:`Result` with the mean attention maps behind it, by REF.

    Attributes:
        maps: the mean map of every head; of all queries, whatever ``queries`` were scored.
        classes: the class of every head.
    """

    maps: Mapping[str, Maps] = field(default_factory=dict)
    classes: Mapping[str, Classes] = field(default_factory=dict)

    def plot(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """The mean maps of one checkpoint (default: the last), with each head's class."""
        ref = list(self.maps)[-1] if ref is None else ref
        classes = self.classes[ref]
        titles = {
            head: f"{head.layer}.{head.head} {name}"
            for name, heads in classes.groups.items()
            for head in heads
        }
        return self.maps[ref].plot(titles=titles)

    def page(self, title: str | None = None) -> Page:
        """The maps of every checkpoint, and the table."""
        page = super().page(title or "attention")
        figures = []
        for ref in self.maps:
            figure = self.plot(ref)
            figures.append(
                Figure(figure, f"Mean attention, {ref}", self.caption(), height=int(figure.layout.height))
            )
        return Page(page.title, [*figures, *page.sections[1:]], page.config, page.versions)

    def caption(self) -> str:
        return "A map per head, titled with its class: layers down, heads across; queries down, keys across."


def attention(
    refs: str | Sequence[str],
    templates: str | Sequence[str] = (),
    queries: str | Sequence[int] = READ,
    threshold: float = THRESHOLD,
    **options: Unpack[Options],
) -> AttentionResult:
    """Score every head's attention against templates, give each head a class, and see how far its attention moves.

    Args:
        refs: one or several REFs; all see the same examples.
        templates: names of templates that the task declares in ``attention_templates()``, or ``"identity"``,
            ``"previous"`` and ``"first"``, which need no task. Default: all of the task's, without a task those three.
        queries: score these: ``"read"``, the positions whose output the task reads, ``"all"``, positions, or a
            boolean mask of the task's examples by name (``"hidden"``, ``"observed"``).
        threshold: of ``circuits.patterns.classify``.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Returns:
        An :class:`AttentionResult`. A row for each head (the ``variant``) and template (the ``metric``): ``value``
        is the share of attention on the template's keys, ``baseline`` that of uniform attention, ``effect`` their
        difference, ``intervention`` the head's class. And a row for each head and each change that the task
        declares in ``attention_moves(batch, seed)``: the share of attention that goes elsewhere; its ``baseline``
        is that between unrelated examples.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    asked = [templates] if isinstance(templates, str) else list(templates)
    where = check_queries(queries)
    check_threshold(threshold)
    maps: dict[str, Maps] = {}
    classes: dict[str, Classes] = {}

    def looked(subject: Subject) -> Found:
        from circuits import patterns

        ref, chosen = str(subject.labels["ref"]), selected(subject, where)
        scores = patterns.scores(
            subject.model,
            subject.tokens,
            named(subject, asked),
            batch=subject.batch,
            queries=chosen,
            seed=subject.seed,
        )
        maps[ref] = patterns.attention(subject.model, subject.tokens)
        classes[ref] = patterns.classify(scores, threshold)
        moves = {
            change: patterns.movement(
                subject.model, subject.tokens, other.tokens, queries=chosen, seed=subject.seed
            )
            for change, other in moved(subject).items()
        }
        return Found(table(scores, classes[ref], moves, chosen), {})

    result = measure(
        "attention",
        refs,
        options,
        looked,
        config={"templates": asked or "all", "queries": where or "all", "threshold": threshold},
    )
    return AttentionResult(
        result.experiment,
        result.frame,
        result.config,
        notes(classes, bool(result.frame["metric"].str.startswith(MOVED).any())),
        result.versions,
        maps,
        classes,
    )


def notes(classes: Mapping[str, Classes], moves: bool) -> tuple[str, ...]:
    """What a reader of the numbers needs; the rule of the classes is the same for all checkpoints."""
    rules = list(dict.fromkeys(found.rule for found in classes.values()))
    return (
        "Score: share of attention on the template's keys. Chance: that of uniform attention to all keys that the "
        "query may see.",
        *rules,
        *(["Moved by: share of attention that goes to other keys where only this changes."] if moves else []),
        "Intervals: 95%, bootstrap over examples. The other templates: --format csv or json, --out.",
    )


def check_threshold(threshold: float) -> None:
    if not 0 < threshold <= 1:
        raise UserError(f"--threshold {threshold:g}: above 0 and at most 1")


def named(subject: Subject, asked: Sequence[str]) -> dict[str, Tensor | Callable[[Any], Tensor]]:
    """The templates asked for, by name."""
    from circuits import patterns

    length = subject.tokens.shape[1]
    known: dict[str, Any] = {
        "identity": patterns.identity(length),
        "previous": patterns.previous(length),
        "first": patterns.constant(length, 0),
    }
    declare = getattr(subject.task, "attention_templates", None)
    declared: dict[str, Any] = known if declare is None else dict(declare())
    known |= declared
    for name in asked:
        if name not in known:
            raise UserError(
                f"--template {name!r}: {subject.checkpoint.ref} has no such template; write {', '.join(known)}"
            )
    return {name: known[name] for name in dict.fromkeys(asked or declared)}


def selected(subject: Subject, where: str | tuple[int, ...] | None) -> Any:
    """The queries to score, as ``circuits`` takes them."""
    if where != READ:
        return positions(subject, where)
    return None if subject.task is None else list(subject.task.read_positions)


def moved(subject: Subject) -> dict[str, Any]:
    """Examples paired with those of the run, by what is different in them."""
    declare = getattr(subject.task, "attention_moves", None)
    if declare is None or len(subject.tokens) < 2:
        return {}
    return dict(declare(subject.batch, subject.seed))


def table(scores: Scores, classes: Classes, moves: Mapping[str, Movement], queries: Any) -> pandas.DataFrame:
    """The rows of one checkpoint: head by head its templates, then its movements."""
    import pandas

    shared = ["layer", "head", "effect", "effect_ci_low", "effect_ci_high", "ci_low", "ci_high", "n"]
    of_templates = scores.frame[[*shared, "template", "score", "chance"]]
    parts = [of_templates.rename(columns={"template": "metric", "score": "value", "chance": "baseline"})]
    for change, movement in moves.items():
        found = movement.frame[[*shared, "distance", "unpaired"]]
        parts.append(
            found.rename(columns={"distance": "value", "unpaired": "baseline"}).assign(
                metric=f"{MOVED}{change}"
            )
        )
    frame = pandas.concat(parts, ignore_index=True).sort_values(
        ["layer", "head"], kind="stable", ignore_index=True
    )
    of_head = {(row["layer"], row["head"]): row["class"] for row in classes.frame.to_dict("records")}
    heads = list(zip(frame["layer"], frame["head"], strict=True))
    alone = isinstance(queries, (list, tuple)) and len(queries) == 1
    return frame.assign(
        variant=[f"{layer}.{head}" for layer, head in heads],
        intervention=[of_head[head] for head in heads],
        site="pattern",
        position=queries[0] if alone else None,
        engine="naive",
    )
