"""What can be read off activations by a linear map, beside the same on shuffled targets and an untrained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments.measuring import Found, measure
from interp_tasks.experiments.probe_table import AGAINST_SHUFFLED, AGAINST_UNTRAINED
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.specifications import check_heads, check_positions, check_site, has_heads
from interp_tasks.experiments.subjects import Options, Subject
from interp_tasks.experiments.untrained import untrained

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

    from interp_tasks.reporting import Page
    from tasks import ProbeTarget, ProbeTargets

#: A probe of d numbers takes more examples than d: more than other experiments ask for.
SAMPLES = 2048


@dataclass(frozen=True)
class ProbeResult(Result):
    """A :class:`Result` with the tables of ``circuits.probe`` behind it, by REF."""

    tables: Mapping[str, pandas.DataFrame] = field(default_factory=dict)

    def plot(self) -> plotly.graph_objects.Figure:
        """A row of panels per target, a panel per metric: values over layers, with both controls."""
        from interp_tasks.experiments.probe_plots import figure

        return figure(self.tables)

    def page(self, title: str | None = None) -> Page:
        return super().page(title or f"probe: {self.config['method']}")

    def caption(self) -> str:
        return (
            "Lines: probes on held-out examples, bands their 95% intervals. Dotted: the same on targets that were "
            "exchanged between examples. Dashed: the same on an untrained model."
        )


@dataclass(frozen=True)
class Asked:
    """The settings of the probes, checked."""

    sites: tuple[str, ...]
    targets: tuple[str, ...]
    heads: str | None
    positions: tuple[int, ...] | None
    each_position: bool
    intercept: bool
    ridge: tuple[float, ...] | None
    folds: int
    held_out: float | int
    shuffles: int
    untrained: bool

    @property
    def method(self) -> str:
        return (
            "least squares" if self.ridge is None else f"ridge({','.join(f'{one:g}' for one in self.ridge)})"
        )

    @classmethod
    def read(cls, *, sites: str | Sequence[str], targets: str | Sequence[str], **given: Any) -> Asked:
        """The settings as users write them.

        Raises:
            UserError: in one line.
        """
        sites = [sites] if isinstance(sites, str) else sites
        targets = [targets] if isinstance(targets, str) else targets
        heads, positions, ridge = given["heads"], given["positions"], given["ridge"]
        if not sites:
            raise UserError("no site: give --site resid_post, or another")
        checked = tuple(check_site(site) for site in sites)
        without = [site for site in checked if heads is not None and not has_heads(site)]
        if without:
            raise UserError(
                f"--heads: site {without[0]} has no heads; they are at q, k, v, z, scores and pattern"
            )
        read: dict[str, Any] = {
            **given,
            "heads": None if heads is None else check_heads(heads, words=("all",)),
            "positions": check_positions("--positions", positions)
            if isinstance(positions, str)
            else positions,
            "ridge": read_penalties(ridge) if isinstance(ridge, str) else ridge,
        }
        for option, value, least in (("--folds", given["folds"], 2), ("--shuffles", given["shuffles"], 1)):
            if value < least:
                raise UserError(f"{option} {value}: at least {least}")
        held_out = given["held_out"]
        if not (0 < held_out < 1 or (held_out >= 2 and held_out == int(held_out))):
            raise UserError(
                f"--held-out {held_out:g}: give a fraction below 1, or a number of examples from 2"
            )
        read["held_out"] = int(held_out) if held_out >= 2 else held_out
        return cls(sites=checked, targets=tuple(targets), **read)

    def describe(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()
        }


def probe(
    refs: str | Sequence[str],
    sites: str | Sequence[str] = ("resid_post",),
    targets: str | Sequence[str] = (),
    *,
    heads: str | None = None,
    positions: str | Sequence[int] | None = None,
    each_position: bool = False,
    intercept: bool = False,
    ridge: str | Sequence[float] | None = None,
    folds: int = 5,
    held_out: float | int = 0.25,
    shuffles: int = 1,
    untrained: bool = True,
    **options: Unpack[Options],
) -> ProbeResult:
    """Fit linear probes from activations to what the task declares, and score them on other examples.

    Args:
        refs: one or several REFs; all see the same examples.
        sites: ``"resid_post"``, ``"z.1"``, ...; a probe of its own in each layer.
        targets: names of the task's ``probe_targets``; none: all.
        heads: at q, k, v, z, scores and pattern, these heads one by one (``"all"``, ``"0.1+1.0-2"``).
        positions: look there (``"0,2"``), not where the task says; ``each_position``: a probe for each.
        intercept: fit one.
        ridge: ``None``: least squares; a penalty, or several (``"0.1,1,10"``) to choose from, target by target, over
            ``folds`` folds of examples.
        held_out: the fraction, or from 2 the number, of examples that probes are scored on.
        shuffles: how often targets are exchanged for the control.
        untrained: compare with an untrained model as well.
        options: samples (default 2048), seed, split, task, task_config, tokens, device, progress: see
            :class:`Options`.

    Returns:
        A :class:`ProbeResult`: per target, site, metric and split of the entries a row whose ``baseline`` is the same
        probe on shuffled targets, so that ``effect`` is the selectivity, and one whose ``baseline`` is the same
        probe on the untrained model.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that declares no targets.
    """
    asked = Asked.read(
        sites=sites,
        targets=targets,
        heads=heads,
        positions=positions,
        each_position=each_position,
        intercept=intercept,
        ridge=ridge,
        folds=folds,
        held_out=held_out,
        shuffles=shuffles,
        untrained=untrained,
    )
    if options.get("tokens") is not None:
        raise UserError(
            "probe needs a task that declares targets: leave --tokens out, or give --task NAME instead"
        )
    tables: dict[str, pandas.DataFrame] = {}

    def look(subject: Subject) -> Found:
        table = probed(subject, asked)
        tables[str(subject.labels["ref"])] = table
        return Found(rows(table, asked), {})

    options = {**options, "samples": options.get("samples") or SAMPLES}
    result = measure("probe", refs, options, look, config={"method": asked.method, **asked.describe()})
    return ProbeResult(**{**vars(result), "notes": tuple(notes(asked, tables))}, tables=tables)


def read_penalties(text: str) -> tuple[float, ...]:
    """Penalties such as ``0.1,1,10``.

    Raises:
        UserError: for what are no numbers from 0.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= one < 1e300 for one in found):
        raise UserError(
            f"--ridge {text}: write a penalty from 0, or several to choose from, such as 0.1,1,10"
        )
    return found


def probed(subject: Subject, asked: Asked) -> pandas.DataFrame:
    """The table of ``circuits.probe`` of one checkpoint."""
    from circuits import probe as probes

    declared = declared_by(subject)
    chosen = choose(subject, declared, asked.targets)
    found = probes.linear(
        subject.model,
        subject.tokens,
        {name: target.values for name, target in chosen.items()},
        asked.sites,
        kind={name: target.kind for name, target in chosen.items()},
        heads=asked.heads,
        positions=declared.positions if asked.positions is None else asked.positions,
        per_position=asked.each_position,
        splits=declared.splits,
        test=asked.held_out,
        intercept=asked.intercept,
        ridge=asked.ridge,
        folds=asked.folds,
        untrained=untrained(subject) if asked.untrained else None,
        shuffles=asked.shuffles,
        seed=subject.seed,
    )
    return found.frame


def declared_by(subject: Subject) -> ProbeTargets:
    """What the checkpoint's task says can be looked for."""
    task, batch = subject.task, subject.batch
    assert task is not None
    assert batch is not None
    declared = task.probe_targets(batch)
    if not declared.targets:
        raise UserError(
            f"task {task.name!r} declares no targets for probes: give it a method probe_targets(batch)"
        )
    return declared


def choose(subject: Subject, declared: ProbeTargets, names: Sequence[str]) -> dict[str, ProbeTarget]:
    """The targets that are asked for, in that order; of none, all."""
    for name in names:
        if name not in declared.targets:
            assert subject.task is not None
            raise UserError(
                f"--target {name}: task {subject.task.name!r} declares {', '.join(declared.targets)}"
            )
    return {name: declared.targets[name] for name in names or declared.targets}


def rows(table: pandas.DataFrame, asked: Asked) -> pandas.DataFrame:
    """Rows of the tidy table: one per control, beside each other."""
    import pandas

    # Target by target, however many places there are.
    order = {target: number for number, target in enumerate(dict.fromkeys(table["target"]))}
    table = table.sort_values("target", key=lambda names: names.map(order), kind="stable", ignore_index=True)
    place = table["site"] + table["layer"].map(lambda layer: "" if pandas.isna(layer) else f".{layer}")
    for column, mark in (("head", "."), ("position", "@")):
        place += table[column].map(lambda number, mark=mark: "" if pandas.isna(number) else f"{mark}{number}")
    split = table["split"].map(lambda split: "" if split == "all" else f" ({split})")
    common = table[["site", "layer", "head", "position", "value", "ci_low", "ci_high", "n"]].assign(
        variant=table["target"] + " " + place, metric=table["metric"] + split, engine="streamed"
    )
    controls = [("shuffled", "selectivity", AGAINST_SHUFFLED)]
    if asked.untrained:
        controls.append(("untrained", "over_untrained", AGAINST_UNTRAINED))
    parts = [
        common.assign(
            intervention=f"{asked.method}, {against}",
            baseline=table[control],
            effect=table[difference],
            effect_ci_low=table[f"{difference}_ci_low"],
            effect_ci_high=table[f"{difference}_ci_high"],
        )
        for control, difference, against in controls
    ]
    return pandas.concat(parts).sort_index(kind="stable").reset_index(drop=True)


def notes(asked: Asked, tables: Mapping[str, pandas.DataFrame]) -> list[str]:
    first = next(iter(tables.values()))
    fitted, scored = int(first["fit_n"].iloc[0]), int(first["n"].iloc[0])
    intercept = "with" if asked.intercept else "without"
    said = [
        f"Probes: {asked.method} {intercept} intercept, fitted on {fitted} examples, scored on {scored} others.",
        "baseline: the same probe on targets exchanged between examples. effect: value − baseline, the selectivity.",
    ]
    if asked.untrained:
        said.append("untrained: the same probe on a model of this architecture before any training.")
    return [
        *said,
        "Intervals: 95%, bootstrap over held-out examples, differences paired; how else fits could have come out "
        "is not in them.",
        "Also measured: mse and cosine; see --format json or csv, --out, --plot.",
    ]
