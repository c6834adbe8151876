"""Makes a report: measures one run or two, and shows them on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments._circuit.settings import FEWEST
from interp_tasks.measurement.subjects import Examples, Options, Progress, check_refs
from interp_tasks.pages import Page, Section, versions
from interp_tasks.report.published import Published, published_beside
from interp_tasks.report.snapshots import View, measured_views
from interp_tasks.report.source import Source, nearest, read_source

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Report:
    """A run, or two, measured.

    Attributes:
        views: of each run; of a mixture of tasks several.
        published: by view, what is published on its task.
        config: what was asked for, JSON.
    """

    views: Sequence[View]
    published: Mapping[str, Published]
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def headlines(self) -> list[dict[str, str]]:
        """Returns rows with ``quantity`` and a column for each view."""
        from interp_tasks.report.headlines import headline_rows

        return headline_rows(self.views)

    def effects(self) -> pandas.DataFrame:
        """Returns every effect of heads: a row per view, checkpoint, edit, heads and metric."""
        import pandas

        return pandas.concat([view.effects().assign(run=view.name) for view in self.views], ignore_index=True)

    def circuits(self) -> pandas.DataFrame:
        """Returns the smallest faithful circuit of each checkpoint, a row each; none unless they were asked for."""
        from interp_tasks.report.circuits import circuits_frame

        return circuits_frame(self.views)

    def page(self, title: str | None = None) -> Page:
        """Returns one self-contained page, whose slider starts at the end of the training."""
        from interp_tasks.report.page import sections

        names = " and ".join(dict.fromkeys(view.source.name for view in self.views))
        page_sections: list[Section] = sections(self.views, self.published, self.effects())
        return Page(title or f"Report on {names}", page_sections, self.config, self.versions)


def check_report(run: str, compare: str | None, options: Options, *, circuit: bool = False) -> list[Source]:
    """Returns the sources of a report; fast, and refuses what cannot be.

    Raises:
        UserError: in one line.
    """
    examples = Examples.of(options)
    examples.check()
    if circuit and examples.samples is not None and examples.samples < FEWEST:
        raise UserError(
            f"--circuit with --samples {examples.samples}: one half finds the circuit and the other tests it; give "
            f"{FEWEST} or more"
        )
    sources = [read_source(ref) for ref in ([run] if compare is None else [run, compare])]
    if len(sources) > 1 and sources[0].refs == sources[1].refs:
        raise UserError(f"--compare {compare} names the same checkpoints as {run}: name another run")
    for source in sources:
        check_refs(source.refs, examples)
    return sources


def report(
    run: str, compare: str | None = None, *, circuit: bool = False, **options: Unpack[Options]
) -> Report:
    """Measure a run for one page: metrics, head effects, attention and embeddings at each of its checkpoints.

    Args:
        run: a run folder or ``zoo:NAME`` (all its checkpoints), a REF that names some of them, or a checkpoint folder.
        compare: another, shown beside it; at each step of the first its checkpoint of the nearest step.
        circuit: find the smallest circuit of faithfulness 0.9 at each checkpoint, too: half a minute each of a model
            of 4 layers of 8 heads.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`. All
            checkpoints of equal tasks see the same examples.

    Returns:
        A :class:`Report`; ``page()`` is the page, to be written with ``write(path)``.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    sources = check_report(run, compare, options, circuit=circuit)
    total = sum(len(source.checkpoints) for source in sources)
    views: list[View] = []
    before = 0
    for source in sources:
        progress = offset_progress(options.get("progress"), before, total)
        views += measured_views(source, options, progress, circuit=circuit)
        before += len(source.checkpoints)
    steps = views[0].steps
    views = [replace(view, at=nearest(steps, view.steps), beside=len(views) > 1) for view in views]
    published = {view.name: published_beside(view) for view in views}
    config = {"run": run, "compare": compare, "circuit": circuit, **Examples.of(options).describe()}
    config |= {"device": options.get("device", "cpu"), "checkpoints": [source.refs for source in sources]}
    config["trained with"] = {
        source.name: dict(source.run.config) for source in sources if source.run is not None
    }
    return Report(views, published, config)


def offset_progress(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Returns a callback that counts from ``before`` of ``total`` checkpoints."""
    return None if progress is None else partial(_report_offset, progress, before, total)


def _report_offset(progress: Progress, before: int, total: int, done: int, _: int, text: str) -> None:
    progress(before + done, total, text)
