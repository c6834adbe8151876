"""Progress measures of modular arithmetic (Nanda et al. 2023), for each modular answer of a task.

From all inputs of the grid, at the position where the output is read, and the answer's own classes. ``losses``:
restricted, excluded, of the fitted cosines; in nats. Restricted logits and cosines are fitted on all inputs, as
published, and held out: on other inputs of the same split than those that are scored. ``gini``, ``weights``: of every
checkpoint, too. ``map`` (W_L by frequency), ``neurons`` (frequencies removed and in the logits), ``attention`` (as
waves of the digits), ``skips``: of the last checkpoint given of each run. The ``variant`` of a row is the answer, or a
frequency of it; rows under an edit have the unedited model's value as ``baseline``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.panel_grid import Panel, draw_panels
from circuits.figures.panel_kinds import Series, curve, spectrum
from interp_tasks.measurement.loaded_checkpoints import (
    LoadedCheckpoint,
    checkpoints_by_run,
    path_of_run,
    resolve_refs,
    was_trained_on,
)
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.option_parsing import RULES, as_list, parse_frequency_rule, select_kinds
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import Result, Row, experiment, merge_rows
from interp_tasks.pages import Column, Figure, number
from interp_tasks.papers import nanda as words
from interp_tasks.papers.input_grid_and_answers import GridInputs
from interp_tasks.papers.nanda import ALL, LOSS, NONE, SPLITS

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint
    from interp_tasks.papers.nanda.progress_measures import GridModel

#: What is measured of every checkpoint, and of the last one of each run alone.
KINDS = ("losses", "gini", "weights", "map", "neurons", "attention", "skips")
#: The curves that the phases and the figure are made of: metric, what was done, on which inputs -> name.
CURVES = {
    (LOSS, NONE, words.TRAIN): "train loss",
    (LOSS, NONE, words.TEST): "test loss",
    (LOSS, words.RESTRICTED, ALL): "restricted loss",
    (LOSS, words.EXCLUDED, words.TRAIN): "excluded loss",
    (LOSS, words.RESTRICTED + words.HELD_OUT, words.TEST): "held-out restricted loss",
    (words.GINI, NONE, ALL): "gini of W_L",
    (words.SQUARES, NONE, ALL): words.SQUARES,
}
LOSSES = list(CURVES.values())[:5]
#: Below it losses are drawn at the bottom: a loss of 0 has no logarithm.
SMALLEST = 1e-12
#: Answer (or ``""`` for the whole model) -> quantity -> step -> value.
Curves = dict[str, dict[str, dict[int, float]]]
RULE = typer.Option(
    "--rule", metavar="NAME[=NUMBER]", help=f"Which frequencies of W_L are key: {', '.join(RULES)}."
)
KIND = typer.Option(
    "--kind",
    metavar="NAME",
    help=f"Measure these: {', '.join(KINDS)}; repeat for several.",
    show_default="all",
)
TRAINING = typer.Option(
    "--train-inputs",
    metavar="FILE.npy",
    help="What the model was trained on, where its checkpoint does not say: indices of the grid's inputs, such as "
    "a·p + b, or a mask.",
)


@dataclass
class RunProgress:
    """One run over its checkpoints.

    Attributes:
        last: the last of the checkpoints that are measured.
        keys: answer -> key frequencies; ``statement``: how they are chosen.
        coefficients: answer -> frequency -> coefficient of cos w(r - c) in the last checkpoint's logits.
    """

    last: ResolvedCheckpoint
    keys: dict[str, tuple[int, ...]] = field(default_factory=dict)
    statement: str = ""
    curves: Curves = field(default_factory=dict)
    coefficients: dict[str, list[float]] = field(default_factory=dict)

    def find_key_frequencies(self, inputs: GridInputs, rule: tuple[str, float], device: str) -> None:
        """Finds the key frequencies of each answer, of W_L in the last checkpoint that the run has stored."""
        from circuits.fourier import key_frequencies, spectrum
        from interp_tasks.checkpoints import load_checkpoint
        from interp_tasks.papers.nanda.progress_measures import neuron_logit_map

        ref = self.last.ref if self.last.run_name is None else f"{self.last.run_name}@last"
        weights = neuron_logit_map(load_checkpoint(ref, device=device).model)
        for name, answer in inputs.answers.items():
            found = key_frequencies(spectrum(weights[:, answer.classes], axis=1), *rule)
            self.statement, self.keys[name] = found.rule, found.keys

    def measure_and_store_rows(
        self, subject: LoadedCheckpoint, on_grid: GridModel, kinds: Sequence[str]
    ) -> Iterator[Row]:
        """Yields the rows of one checkpoint; of the last one its mechanism and the run's phases too."""
        from interp_tasks.papers.nanda import progress_measures
        from interp_tasks.papers.nanda.grokking_phases import phase_rows

        answers = on_grid.inputs.answers
        rows: list[Row] = []
        if "losses" in kinds:
            rows += (
                row
                for name, one in answers.items()
                for row in progress_measures.restricted_loss_rows(on_grid, one, self.keys[name])
            )
        if "gini" in kinds:
            rows += progress_measures.w_l_and_w_e_gini_rows(on_grid, self.keys)
        if "weights" in kinds:
            rows += progress_measures.squared_weights_rows(on_grid)
        self.store_curve_values(rows, subject.stored.step)
        yield from rows
        if subject.stored.path != self.last.path:
            return
        for name, answer in answers.items():
            logits, keys = on_grid.logits[:, answer.classes], self.keys[name]
            self.coefficients[name] = answer.sum.cosines(logits).coefficients.tolist()
            if "map" in kinds:
                yield from progress_measures.neuron_logit_map_rows(on_grid, answer, keys)
            if "neurons" in kinds and keys:
                yield from progress_measures.frequency_removal_rows(on_grid, answer, keys)
            yield from phase_rows(name, self.curves.get(name, {}) | self.curves.get("", {}))
        if "attention" in kinds:
            yield from progress_measures.attention_wave_fit_and_loss_rows(on_grid)
        if "skips" in kinds:
            yield from progress_measures.attention_and_skip_ablation_rows(on_grid)

    def store_curve_values(self, rows: Sequence[Row], step: int) -> None:
        """Stores the values that the phases and the figure are made of."""
        for row in rows:
            quantity = CURVES.get((row["metric"], row["intervention"], row.get("split", ALL)))
            answer = row["variant"]
            if answer in (words.OF_W_E, words.ALL_WEIGHTS):
                answer, quantity = "", "gini of W_E" if answer == words.OF_W_E else quantity
            if quantity is not None:
                self.curves.setdefault(answer, {}).setdefault(quantity, {})[step] = row["value"]


@experiment(
    says={"rule": None, "train": None, "kinds": []}, without=("tokens", "prompts", "samples", "split")
)
def progress(
    refs: str | Sequence[str],
    *,
    rule: Annotated[str, RULE] = "of-largest",
    kinds: Annotated[str | Sequence[str], KIND, list[str]] = (),
    train: Annotated[Any, TRAINING, str | None] = None,
    **options: Unpack[Options],
) -> Result:
    """See how far a model of modular arithmetic has come: Nanda et al.'s progress measures, for each answer.

    Restricted and excluded loss, cosines in the logits, Gini coefficients, weight norms, W_L and neurons by frequency,
    attention as waves of the digits, losses without attention or MLP; of a run's checkpoints the phases too.

    Args:
        refs: one or several REFs; four or more of a run give its phases, bounded by its train and test loss.
        rule: which frequencies are key, as in ``fourier``, of W_L = W_U·W_out over the answer's classes. They are taken
            from the last checkpoint that the run has stored, whichever are given, and used at all.
        kinds: some of ``KINDS``; none: all.
        train: the training inputs, where the checkpoints do not say what they were trained on; the others are test
            inputs. Indices of the grid's inputs (the last coordinate varies fastest: a·p + b), a mask of all of them,
            or an ``.npy`` file of either.
        options: seed, task, task_config, device, progress: see :class:`Options`. Nothing is sampled.
    """
    from interp_tasks.papers.nanda.progress_measures import GridModel, split_rows

    parsed = parse_frequency_rule(rule)
    chosen = select_kinds(as_list(kinds), KINDS)
    found = resolve_refs(refs, Examples.of(options))
    runs = checkpoints_by_run(found)
    followed = {run: RunProgress(several[-1]) for run, several in runs.items()}
    grids: dict[tuple[Any, bool], tuple[GridInputs, Any]] = {}
    unknown: dict[str, None] = {}

    def inputs_and_splits(subject: LoadedCheckpoint) -> tuple[GridInputs, Any]:
        """Returns the inputs and splits of a checkpoint's task, read once for all that have the same."""
        own_split = train is None and was_trained_on(subject.stored, subject.task)
        if train is None and not own_split:
            unknown[subject.stored.label] = None
        if (subject.task, own_split) not in grids:
            inputs = GridInputs.of(subject.task, "progress")
            grids[subject.task, own_split] = inputs, split_rows(inputs, train, own_split=own_split)
        return grids[subject.task, own_split]

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        run, (inputs, splits) = followed[path_of_run(subject)], inputs_and_splits(subject)
        if not run.keys:
            run.find_key_frequencies(inputs, parsed, options.get("device", "cpu"))
        rows = run.measure_and_store_rows(subject, GridModel.of(subject.model, inputs, splits), chosen)
        return [{"split": ALL, "n": len(splits[row.get("split", ALL)]), **row} for row in rows]

    config: dict[str, Any] = {"refs": [one.label for one in found], "rule": f"{parsed[0]}={parsed[1]:g}"}
    stated = train if train is None or isinstance(train, str) else "given"
    config |= {"train": stated, "kinds": list(chosen if kinds else ())}
    ordered = [one for several in runs.values() for one in several]
    result = measure("progress", ordered, options, measure_checkpoint, config=config, check=inputs_and_splits)
    return replace(result, notes=tuple(key_and_split_notes(followed, unknown)), data={"runs": followed})


def key_and_split_notes(followed: Mapping[str, RunProgress], unknown: Iterable[str]) -> Iterator[str]:
    """Yields which frequencies are key, by which rule, and what the splits are."""
    yield "Over all inputs of the grid: nothing is sampled. loss: cross-entropy in nats."
    for run in followed.values():
        listed = "; ".join(f"{name} {', '.join(map(str, keys)) or 'none'}" for name, keys in run.keys.items())
        yield f"Key frequencies of {run.last.run_name or run.last.label}: {listed}."
    yield (
        f"{next(iter(followed.values())).statement}; of W_L over the answer's classes, in the last checkpoint that the "
        "run has stored, for all checkpoints."
    )
    if unknown:
        yield (
            f"{', '.join(unknown)}: no train or test, nothing held out, as the checkpoint does not say what it was "
            "trained on: state it by --train-inputs FILE.npy."
        )
    else:
        yield (
            "Restricted logits and cosines are fitted on all inputs, as published; held out: on other inputs of the "
            "same split than those that are scored."
        )


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns splits as columns; no accuracies under edits; before a run's last checkpoint whole answers alone."""
    last = frame.groupby("run", dropna=False)["step"].transform("max") == frame["step"]
    is_whole = ~frame["variant"].str.contains(", frequency ") & (
        frame["metric"].isin([LOSS, words.GINI]) | (frame["variant"] == words.ALL_WEIGHTS)
    )
    plain = (frame["metric"] != words.ACCURACY) | (frame["intervention"] == NONE)
    shown = frame[(last | is_whole) & plain]
    is_of_head, edited = shown["head"].notna(), shown["intervention"] != NONE
    of_head = ", head " + shown["layer"].astype("string") + "." + shown["head"].astype("string")
    shown = shown.assign(
        variant=shown["variant"].where(~is_of_head, shown["variant"] + of_head),
        metric=shown["metric"].where(~edited, shown["metric"] + ", " + shown["intervention"]),
        **dict.fromkeys(SPLITS, math.nan),
    )
    return merge_rows(
        shown,
        lambda row: (row["ref"], row["variant"], row["metric"]),
        lambda row: {row["split"]: row["value"]},
    )


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    def text(row: Mapping[str, Any], split: str) -> str:
        if math.isnan(row[split]):
            return ""
        return number(row[split], 3, sign=True) if row["metric"].startswith("change") else number(row[split])

    splits = [split for split in SPLITS if split == ALL or frame[split].notna().any()]
    columns = [Column("", "variant"), Column("measure", "metric")]
    return [*columns, *(Column(split, split, partial(text, split=split)) for split in splits)]


def figures(result: Result) -> list[Figure]:
    """Returns curves over training where a run has several checkpoints, then the last one's frequencies."""
    caption = (
        "Restricted loss: on all inputs, key frequencies kept alone; held out: on test inputs, fitted on others. "
        "Excluded loss: on training inputs, without them. Dotted lines: boundaries of the phases. Bars: coefficients "
        "of cos w(r − c) in the logits, key frequencies in the second colour."
    )
    panels: list[Panel] = []
    for name, run in result.data["runs"].items():
        if any(len(each) > 1 for of_answer in run.curves.values() for each in of_answer.values()):
            panels += training_panels(name.rsplit("/", 1)[-1], run.curves)
        for answer, values in run.coefficients.items():
            size: dict[str, Any] = {"y": "coefficient (logits)", "height": 280, "width": 300}
            title = f"{run.last.label}: {answer}"
            panels.append(spectrum(list(range(1, len(values))), values[1:], run.keys[answer], title, **size))
    figure = draw_panels(panels, columns=2 if len(panels) > 6 else 1, barmode="overlay")
    return [Figure(figure, "Progress measures", caption)]


def training_panels(name: str, curves: Curves) -> Iterator[Panel]:
    """Yields the losses of each answer, Gini coefficients and weights of a run with several checkpoints."""
    from interp_tasks.papers.nanda.grokking_phases import phase_boundaries

    def lines(
        series: Mapping[str, Mapping[int, float]], title: str, y: str, least: float = -math.inf, **panel: Any
    ) -> Panel:
        drawn = {
            of: Series(sorted(each), [max(each[step], least) for step in sorted(each)], look=at)
            for at, (of, each) in enumerate(series.items())
        }
        return curve(drawn, f"{name}: {title}", y=y, height=280, width=300, **panel)

    for answer, of_answer in curves.items():
        shown = {loss: of_answer[loss] for loss in LOSSES if loss in of_answer}
        # A phase that did not begin is NaN.
        bounds = [step for step in phase_boundaries(shown).values() if step == step]
        dotted = [{"x": step, "line": {"dash": "dot", "width": 1}} for step in bounds]
        if shown:
            yield lines(shown, answer, "loss (nats)", SMALLEST, log_y=True, lines=dotted)
    for answer, of_answer in curves.items():
        for quantity, y in (
            ("gini of W_L", "Gini"),
            ("gini of W_E", "Gini"),
            (words.SQUARES, "sum of squares"),
        ):
            if quantity in of_answer:
                yield lines({quantity: of_answer[quantity]}, f"{quantity} {answer}".strip(), y)
