"""Reads what the residual stream holds: linear probes, and the lens of the final norm and unembedding.

Of :func:`lens` the rows ``read-out after embed``, ``read-out after layer 0``, ... (the final norm and unembedding
applied there) and ``without direct 0.1``, ``without direct mlp 0``, ... (the output minus what the component adds to it
along the residual stream), each compared with the full output.

Of :func:`probe` per target, site, metric and split of the entries a row whose ``baseline`` is the same probe on
shuffled targets, so that ``effect`` is the selectivity, and one whose ``baseline`` is the same probe on the untrained
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.model.sites import KINDS, Site
from interp_tasks.errors import UserError
from interp_tasks.measurement.activations_in_passes import split_into_passes
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, Refs
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.option_parsing import as_list, check_layer, chosen_names, layer_of_site
from interp_tasks.measurement.options_and_examples import Options
from interp_tasks.measurement.result import Result, experiment, value_text
from interp_tasks.measurement.untrained_models import build_untrained as untrained_model
from interp_tasks.pages import Column, Figure, number

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from tasks import ProbeTargets

READ_OUT, WITHOUT = "read-out", "without direct"


NOTES = (
    "read-out after: final norm and unembedding applied to the residual stream there; after the last layer "
    "it is the output.",
    "without direct: what the component adds straight to the output is taken away, the final norm's scale "
    "kept; what later layers make of it stays.",
)


@experiment(judged_by_task=True)
def lens(refs: Refs, **options: Unpack[Options]) -> Result:
    """Read the residual stream out after each layer, and the output without each component's direct effect.

    Every number is compared with the full output on the same examples.

    Args:
        refs: one or several REFs; all see the same examples.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.
    """
    return measure("lens", refs, options, lens_rows, config={}, notes=NOTES)


def lens_rows(subject: LoadedCheckpoint) -> pandas.DataFrame:
    """Returns the rows of one checkpoint."""
    from circuits import compare
    from circuits import lens as through

    columns: dict[str, dict[str, Any]] = {}

    def outputs_of_passes() -> Iterator[tuple[Any, dict[str, Any]]]:
        for tokens in split_into_passes(subject.tokens):
            seen: Any = through(subject.model, tokens)
            outputs: dict[str, Any] = {}
            for name, output in seen.readouts.items():
                variant = f"{READ_OUT} after {name}"
                outputs[variant] = output
                layer = None if name == "embed" else int(name.removeprefix("layer "))
                site = "resid_pre" if layer is None else "resid_post"
                columns[variant] = {"intervention": READ_OUT, "head": None, "site": site, "layer": layer or 0}
            for name in seen.contributions:
                label, about = component_label_and_columns(name)
                outputs[f"{WITHOUT} {label}"] = seen.without(name)
                columns[f"{WITHOUT} {label}"] = {"intervention": WITHOUT, **about}
            yield seen.output, outputs

    metric = None if subject.task is None else subject.task.metrics
    return compare(outputs_of_passes(), metric, subject.batch, columns, subject.seed).frame


def component_label_and_columns(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the label and columns of a component that ``circuits`` calls ``0.1``, ``mlp_out.0`` or ``embed``."""
    if name[0].isdigit():
        layer, head = map(int, name.split("."))
        return name, {"site": "z", "layer": layer, "head": head}
    site, dot, layer_text = name.partition(".")
    label = f"{'mlp' if site == 'mlp_out' else site} {layer_text}".strip()
    return label, {"site": site, "layer": int(layer_text) if dot else None, "head": None}


#: A probe of d numbers takes more examples than d: more than other experiments ask for.
#: Two to fit a line, two to score it.
FEWEST = 4
#: What ``intervention`` says of a row: what its baseline is.
AGAINST_SHUFFLED = "least squares, against shuffled targets"
AGAINST_UNTRAINED = "least squares, against the untrained model"
#: Metrics that are left out: r2 and abs_cosine say the same on a scale that all targets share.
NOT_SHOWN = ("mse", "cosine")
BASELINE = "baseline: the same probe on targets exchanged between examples. effect: value − baseline, the selectivity."
CONTROL = "untrained: the same probe on a model of this architecture before any training."
INTERVALS = (
    "Intervals: 95%, bootstrap over held-out examples, differences paired. The other metrics: --format json or csv, "
    "--out."
)
SITES = typer.Option(
    "--site", metavar="SITE", help=f"{', '.join(KINDS)}; in layer 1 alone z.1. Repeat for several."
)
TARGETS = typer.Option("--target", metavar="NAME", help="One that the task declares; repeat. Default: all.")
HELD_OUT = typer.Option("--held-out", help="Fraction, or number, of examples to score on.")
UNTRAINED = typer.Option("--untrained/--no-untrained", help="Compare with an untrained model.")


@experiment(says={"sites": ["resid_post"], "held_out": 0.25}, samples=2048, without=("tokens",))
def probe(
    refs: Refs,
    sites: Annotated[str | Sequence[str], SITES, list[str]] = ("resid_post",),
    targets: Annotated[str | Sequence[str], TARGETS, list[str]] = (),
    *,
    held_out: Annotated[float | int, HELD_OUT, float] = 0.25,
    untrained: Annotated[bool, UNTRAINED] = True,
    **options: Unpack[Options],
) -> Result:
    """Fit linear probes from activations to what the task declares, and score them on other examples.

    Beside each stands the same probe on shuffled targets, and on an untrained model.

    Args:
        sites: ``"resid_post"``, ``"z.1"``, ...; a probe of its own in each layer.
        targets: names of the task's ``probe_targets``; none: all.
        held_out: the fraction, or from 2 the number, of examples that probes are scored on.
        untrained: whether there is an untrained model.
        options: as :class:`Examples` has them; 2048 samples by default.

    Single heads and positions, ridge penalties, intercepts: ``circuits.probe.linear``.
    """
    if not (0 < held_out < 1 or (held_out >= 2 and held_out == int(held_out))):
        raise UserError(f"--held-out {held_out:g}: give a fraction below 1, or a number of examples from 2")
    places = [str(Site.parse(each)) for each in as_list(sites)]
    names = as_list(targets)
    test = int(held_out) if held_out >= 2 else held_out
    if not places:
        raise UserError("no site: give --site resid_post, or another")
    tables: dict[str, pandas.DataFrame] = {}

    def check_sizes(sizes: Any, name: str) -> None:
        for site in places:
            check_layer(f"--site {site}", layer_of_site(site), sizes, name)

    def measure_checkpoint(subject: LoadedCheckpoint) -> pandas.DataFrame:
        table = tables[str(subject.labels["ref"])] = fit_probes(subject, places, names, test, untrained)
        return rows_against_each_control(table, untrained=untrained)

    config = {"sites": places, "targets": names, "held_out": test, "untrained": untrained}
    checks: Any = {"check_sizes": check_sizes, "check": lambda subject: chosen_targets(subject, names)}
    result = measure("probe", refs, options, measure_checkpoint, config=config, **checks)
    first = next(iter(tables.values())).iloc[0]
    fitted = f"Probes: least squares, fitted on {int(first['fit_n'])} examples, scored on {int(first['n'])} others."
    notes = (fitted, BASELINE, *([CONTROL] if untrained else []), INTERVALS)
    return replace(result, notes=notes, data={"tables": tables})


def fit_probes(
    subject: LoadedCheckpoint, sites: Sequence[str], names: Sequence[str], test: float | int, untrained: bool
) -> pandas.DataFrame:
    """Returns the scores of the probes of one checkpoint, beside those of an untrained model."""
    from circuits import probe as probes

    declared = chosen_targets(subject, names)
    return probes.linear(
        subject.model,
        subject.tokens,
        {name: target.values for name, target in declared.targets.items()},
        sites,
        kind={name: target.kind for name, target in declared.targets.items()},
        positions=declared.positions,
        splits=declared.splits,
        test=test,
        untrained=untrained_model(subject) if untrained else None,
        seed=subject.seed,
    ).frame


def chosen_targets(subject: LoadedCheckpoint, names: Sequence[str]) -> ProbeTargets:
    """Returns what the checkpoint's task declares, with the targets named in their order; all where none is."""
    task, batch = subject.task, subject.batch
    assert task is not None
    assert batch is not None
    if (n := len(subject.tokens)) < FEWEST:
        raise UserError(f"--samples {n}: some examples are fitted and others scored; give {FEWEST} or more")
    # Where a sign is the solver's, as of singular vectors, targets are the same for every device of the model.
    declared = task.probe_targets(batch.to("cpu"))
    if not declared.targets:
        raise UserError(
            f"task {task.name!r} declares no targets for probes: give it a method probe_targets(batch)"
        )
    chosen = chosen_names(declared.targets, names, "--target", task)
    return replace(declared, targets={name: declared.targets[name] for name in chosen})


def rows_against_each_control(table: pandas.DataFrame, *, untrained: bool) -> pandas.DataFrame:
    """Returns rows of the tidy table, target by target: one per control, beside each other."""
    import pandas

    order = {target: number for number, target in enumerate(dict.fromkeys(table["target"]))}
    table = table.sort_values("target", key=lambda names: names.map(order), kind="stable", ignore_index=True)
    place = table["site"] + ("." + table["layer"].astype("string")).fillna("")
    split = table["split"].map(lambda split: "" if split == "all" else f" ({split})")
    columns = ["site", "layer", "head", "value", "value_ci_low", "value_ci_high", "n"]
    names = {"variant": table["target"] + " " + place, "metric": table["metric"] + split}
    common = table[columns].assign(**names, engine="streamed")
    controls = [
        ("shuffled", "selectivity", AGAINST_SHUFFLED),
        ("untrained", "over_untrained", AGAINST_UNTRAINED),
    ]
    parts = []
    for control, difference, against in controls if untrained else controls[:1]:
        effects = {f"effect{end}": table[f"{difference}{end}"] for end in ("", "_ci_low", "_ci_high")}
        parts.append(common.assign(intervention=against, baseline=table[control], **effects))
    return pandas.concat(parts).sort_index(kind="stable").reset_index(drop=True)


def probe_view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns rows against shuffled targets, the other row's control in a column ``untrained``."""
    frame = frame[~frame["metric"].str.split(" ").str[0].isin(NOT_SHOWN)]
    other = frame["intervention"] == AGAINST_UNTRAINED
    keys = ["ref", "variant", "metric"]
    untrained_rows = frame.loc[other, [*keys, "baseline"]].rename(columns={"baseline": "untrained"})
    return frame[~other].merge(untrained_rows, how="left", on=keys)


def probe_view_columns(frame: pandas.DataFrame) -> list[Column]:
    shown = ["variant", "metric", "baseline", *(["untrained"] if frame["untrained"].notna().any() else [])]
    value = Column("value [95% CI]", "value", value_text)
    effect = Column("effect", "effect", lambda row: number(row["effect"], 3, sign=True))
    return [*(Column(name, name) for name in shown), value, effect]


def probe_figures(result: Result) -> list[Figure]:
    """Returns a row of panels per target, a panel per metric: values over layers, with both controls."""
    import pandas

    from circuits.figures.results import probe_figure

    caption = (
        "Lines: probes on held-out examples, bands their 95% intervals. Dotted: the same on targets that were "
        "exchanged between examples. Dashed: the same on an untrained model. Of a single layer: points, crosses "
        "and open circles."
    )
    tables: Mapping[str, pandas.DataFrame] = result.data["tables"]
    every = pandas.concat([table.assign(ref=ref) for ref, table in tables.items()], ignore_index=True)
    return [Figure(probe_figure(every, by="ref"), "Scores of probes on held-out examples, by layer", caption)]
