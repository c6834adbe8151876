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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, curve, spectrum
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import RULES, check_kinds, parse_rule
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    by_run,
    check_has_task,
    in_runs,
    resolve_refs,
    run_of,
    trained_on,
)
from interp_tasks.measurement.table import Row, side_by_side
from interp_tasks.pages import Column, Figure, number, signed
from interp_tasks.papers.nanda.inputs import ACCURACY, ALL, LOSS, NONE, SPLITS, TEST, TRAIN
from interp_tasks.papers.nanda.logits import (
    ALL_WEIGHTS,
    EXCLUDED,
    GINI,
    RESTRICTED,
    RESTRICTED_HELD_OUT,
    SQUARES,
)

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint
    from interp_tasks.papers.nanda.inputs import Inputs
    from tasks import Task

#: What is measured of every checkpoint, and of the last one of each run alone; and what has to be recorded for it.
KINDS = ("losses", "gini", "weights", "map", "neurons", "attention", "skips")
SITES = {"map": "mlp_post", "neurons": "mlp_post", "attention": "pattern"}
#: The losses that the phases and the figure are made of: what was done, on which inputs -> name.
LOSSES = {
    (NONE, TRAIN): "train loss",
    (NONE, TEST): "test loss",
    (RESTRICTED, ALL): "restricted loss",
    (EXCLUDED, TRAIN): "excluded loss",
    (RESTRICTED_HELD_OUT, TEST): "held-out restricted loss",
}
#: Below it losses are drawn at the bottom: a loss of 0 has no logarithm.
SMALLEST = 1e-12
#: Quantity -> step -> value.
Curves = Mapping[str, Mapping[int, float]]
RULE = typer.Option(
    "--rule",
    metavar="NAME[=NUMBER]",
    help=f"Which frequencies of W_L are key: {', '.join(RULES)}.",
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


@experiment("modular", says={"rule": None, "train": None, "kinds": []})
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
        refs: one or several REFs; four or more of a run give its phases (:mod:`interp_tasks.papers.nanda.phases`).
        rule: which frequencies are key, as in ``fourier``, of W_L = W_U·W_out over the answer's classes. They are taken
            from the last checkpoint that the run has stored, whichever are given, and used at all.
        kinds: some of ``KINDS``; none: all.
        train: the training inputs, where the checkpoints do not say what they were trained on; the others are test
            inputs. Indices of the grid's inputs (the last coordinate varies fastest: a·p + b), a mask of all of them,
            or an ``.npy`` file of either.
        options: seed, task, task_config, device, progress: see :class:`Options`. Nothing is sampled.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without modular answers.
    """
    name, at = parse_rule(rule)
    chosen_kinds = check_kinds([kinds] if isinstance(kinds, str) else kinds, KINDS)
    check_has_task("progress", options)
    found = resolve_refs(refs, Examples.of(options))
    runs = by_run(found)
    grids = Grids(train)
    device = options.get("device", "cpu")
    followed = {run: RunMeasures(named, (name, at), device) for run, named in runs.items()}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        return followed[run_of(subject)].measured(subject, grids.of(subject), chosen_kinds)

    config = {
        "rule": f"{name}={at:g}",
        "keys from": "the last checkpoint stored of each run",
        "train": train if train is None or isinstance(train, str) else "given",
        "kinds": list(chosen_kinds) if kinds else [],
    }
    result = measure("progress", in_runs(runs), options, measure_checkpoint, config=config, check=grids.of)
    return replace(
        result,
        config={**result.config, "refs": [one.label for one in found]},
        notes=tuple(notes(followed, grids.unknown)),
        data={"runs": followed},
    )


@dataclass
class Grids:
    """The inputs of each checkpoint's task, read once for all that have the same.

    Attributes:
        train: the training inputs that a user stated.
        unknown: checkpoints that do not say what they were trained on.
    """

    train: Any
    unknown: dict[str, None] = field(default_factory=dict)
    read: dict[tuple[Task | None, bool], Inputs] = field(default_factory=dict)

    def of(self, subject: LoadedCheckpoint) -> Inputs:
        from interp_tasks.papers.nanda.inputs import read_inputs

        own_split = self.train is None and trained_on(subject.stored, subject.task)
        if self.train is None and not own_split:
            self.unknown[subject.stored.label] = None
        if (subject.task, own_split) not in self.read:
            self.read[subject.task, own_split] = read_inputs(subject.task, self.train, own_split=own_split)
        return self.read[subject.task, own_split]


@dataclass
class RunMeasures:
    """One run over its checkpoints.

    Attributes:
        rule: the name of the rule of key frequencies, and its number.
        keys: answer -> key frequencies; ``statement``: how they are chosen.
        curves: answer (or ``""`` for the whole model) -> quantity -> step -> value.
        coefficients: answer -> frequency -> coefficient of cos w(r - c) in the last checkpoint's logits.
    """

    named: Sequence[ResolvedCheckpoint]
    rule: tuple[str, float]
    device: str
    keys: dict[str, tuple[int, ...]] = field(default_factory=dict)
    statement: str = ""
    curves: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    coefficients: dict[str, list[float]] = field(default_factory=dict)

    def measured(self, subject: LoadedCheckpoint, inputs: Inputs, kinds: Sequence[str]) -> Measured:
        """Measures one checkpoint, by the key frequencies of its run's last stored one; of the last one the run too."""
        import pandas

        from interp_tasks.papers.nanda.inputs import activations
        from interp_tasks.papers.nanda.logits import rows_of_losses, rows_of_weights
        from interp_tasks.papers.nanda.neurons import rows_of_gini

        if not self.keys:
            self.find_keys(inputs)
        is_last = subject.checkpoint.path == self.named[-1].path
        sites = [site for kind, site in SITES.items() if kind in kinds and is_last]
        logits, seen = activations(subject.model, inputs, sites)
        rows: list[Row] = []
        for answer in inputs.answers:
            keys, of_answer = self.keys[answer.name], logits[:, answer.classes]
            if "losses" in kinds:
                rows += rows_of_losses(inputs, answer, of_answer, keys)
            if "gini" in kinds:
                rows += rows_of_gini(subject.model, answer, keys)
            if is_last:
                self.coefficients[answer.name] = answer.sum.cosines(of_answer).coefficients.tolist()
        assert subject.task is not None
        digits = subject.task.grid_axes()[0].values
        weights = rows_of_weights(subject.model, digits)
        rows += [row for row in weights if ("gini" if row["metric"] == GINI else "weights") in kinds]
        self.follow(rows, subject.checkpoint.step)
        if is_last:
            rows += self.mechanism(subject.model, digits, inputs, kinds, logits, seen)
            rows += self.phases()
        rows = [{"split": ALL, **row} for row in rows]
        frame = pandas.DataFrame([{**row, "n": len(inputs.splits[row["split"]])} for row in rows])
        return Measured(frame, {"keys": {name: list(keys) for name, keys in self.keys.items()}})

    def find_keys(self, inputs: Inputs) -> None:
        """Finds the key frequencies of each answer, of W_L in the last checkpoint that the run has stored."""
        from circuits.fourier import key_frequencies, spectrum
        from circuits.fourier._spectrum import RULES as MADE
        from interp_tasks.checkpoints import load_checkpoint
        from interp_tasks.papers.nanda.neurons import w_l

        last = self.named[-1]
        ref = last.ref if last.run_name is None else f"{last.run_name}@last"
        weights = w_l(load_checkpoint(ref, device=self.device).model)
        rule = MADE[self.rule[0]](self.rule[1])
        self.statement = rule.statement
        for answer in inputs.answers:
            found = key_frequencies(spectrum(weights[:, answer.classes], axis=1), rule).keys
            self.keys[answer.name] = tuple(int(key) for key in found)  # type: ignore[arg-type]

    def mechanism(
        self,
        model: Any,
        digits: Sequence[int],
        inputs: Inputs,
        kinds: Sequence[str],
        logits: Any,
        seen: Mapping[str, Any],
    ) -> list[Row]:
        """Returns the rows that look inside one checkpoint: the neurons' map, removals, attention, skips."""
        from interp_tasks.papers.nanda import attention
        from interp_tasks.papers.nanda.neurons import Neurons, rows_of_map, rows_of_removal

        rows: list[Row] = []
        layers = model.cfg.n_layers
        if {"map", "neurons"} & set(kinds):
            neurons = Neurons.of(model, inputs, logits, seen[f"mlp_post.{layers - 1}"])
            for answer in inputs.answers:
                keys = self.keys[answer.name]
                if "map" in kinds:
                    rows += rows_of_map(neurons, answer, keys, digits)
                if "neurons" in kinds and keys:
                    rows += rows_of_removal(neurons, answer, keys)
        if "attention" in kinds:
            patterns = {layer: seen[f"pattern.{layer}"] for layer in range(layers)}
            rows += attention.rows_of_attention(inputs, patterns)
            rows += attention.rows_of_waves(model, inputs, patterns, logits)
        if "skips" in kinds:
            rows += attention.rows_of_skips(model, inputs, logits)
        return rows

    def follow(self, rows: Sequence[Row], step: int) -> None:
        """Stores the values that the phases and the figure are made of."""
        for row in rows:
            answer, quantity = row["variant"], None
            if row["metric"] == LOSS:
                quantity = LOSSES.get((row["intervention"], row["split"]))
            elif row["metric"] == GINI:
                quantity = "gini of W_E" if row["site"] == "embed" else "gini of W_L"
            elif row["metric"] == SQUARES:
                quantity = SQUARES
            if quantity is not None:
                answer = "" if quantity in ("gini of W_E", SQUARES) else answer
                self.curves.setdefault(answer, {}).setdefault(quantity, {})[step] = row["value"]

    def phases(self) -> list[Row]:
        """Returns boundaries of each answer's phases, changes in each, and the half-way step of each curve."""
        from interp_tasks.papers.nanda.phases import begins, boundaries, changes, made

        rows: list[Row] = []
        for answer, own in self.curves.items():
            if (phases := boundaries(own)) is None:
                continue
            steps, curves = sorted(own["test loss"]), {**own, **self.curves.get("", {})}
            lines = {name: [values[step] for step in steps] for name, values in curves.items()}
            ends = {
                "memorisation ends": phases.memorised,
                "cleanup begins": phases.cleanup,
                "cleanup ends": phases.end,
            }
            about = {"variant": answer, "intervention": "boundary of phases"}
            rows += [{**about, "metric": f"step: {name}", "value": step} for name, step in ends.items()]
            half = made(steps, lines["test loss"], 0.5, "max")
            for name, line in lines.items():
                for phase, (first, after) in changes(steps, line, phases).items():
                    row = {"variant": answer, "intervention": phase, "metric": f"change of {name}"}
                    rows.append({**row, "value": after - first, "baseline": first})
                step = made(steps, line, 0.5, begins(name))
                row = {"variant": answer, "intervention": "half of its way", "metric": f"step: {name}"}
                rows.append({**row, "value": step, "baseline": half, "effect": step - half})
        return rows


def notes(followed: Mapping[str, RunMeasures], unknown: Mapping[str, None]) -> Iterator[str]:
    """Yields which frequencies are key, by which rule, and what the splits are."""
    yield "Over all inputs of the grid: nothing is sampled. loss: cross-entropy in nats."
    for one in followed.values():
        run = one.named[-1].run_name or one.named[-1].label
        listed = "; ".join(f"{name} {', '.join(map(str, keys)) or 'none'}" for name, keys in one.keys.items())
        yield f"Key frequencies of {run}: {listed}."
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
        frame["metric"].isin([LOSS, GINI]) | (frame["variant"] == ALL_WEIGHTS)
    )
    plain = (frame["metric"] != ACCURACY) | (frame["intervention"] == NONE)
    shown = frame[(last | is_whole) & plain]
    is_of_head, edited = shown["head"].notna(), shown["intervention"] != NONE
    of_head = ", head " + shown["layer"].astype("string") + "." + shown["head"].astype("string")
    shown = shown.assign(
        variant=shown["variant"].where(~is_of_head, shown["variant"] + of_head),
        metric=shown["metric"].where(~edited, shown["metric"] + ", " + shown["intervention"]),
        **dict.fromkeys(SPLITS, math.nan),
    )
    return side_by_side(
        shown,
        lambda row: (row["ref"], row["variant"], row["metric"]),
        lambda row: {row["split"]: row["value"]},
    )


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    def text(row: Mapping[str, Any], split: str) -> str:
        if math.isnan(row[split]):
            return ""
        return signed(row[split]) if row["metric"].startswith("change") else number(row[split])

    splits = [split for split in SPLITS if split == ALL or (frame["split"] == split).any()]
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
    for run, one in result.data["runs"].items():
        if any(len(each) > 1 for of_answer in one.curves.values() for each in of_answer.values()):
            panels += training_panels(run.rsplit("/", 1)[-1], one.curves)
        for answer, values in one.coefficients.items():
            labels, title = list(range(1, len(values))), f"{one.named[-1].label}: {answer}"
            size: dict[str, Any] = {"y": "coefficient (logits)", "height": 280, "width": 300}
            panels.append(spectrum(labels, values[1:], one.keys[answer], title, **size))
    figure = draw(panels, columns=2 if len(panels) > 6 else 1, barmode="overlay")
    return [Figure(figure, "Progress measures", caption)]


def training_panels(name: str, by_answer: Mapping[str, Curves]) -> list[Panel]:
    """Returns the losses of each answer, Gini coefficients and weights of a run with several checkpoints."""
    from interp_tasks.papers.nanda.phases import boundaries

    panels = []
    for answer, of_answer in by_answer.items():
        losses = {loss: of_answer[loss] for loss in LOSSES.values() if loss in of_answer}
        if losses:
            phases = boundaries(losses)
            # A phase that did not begin is NaN.
            steps = [] if phases is None else [phases.memorised, phases.cleanup, phases.end]
            bounds = [{"x": step, "line": {"dash": "dot", "width": 1}} for step in steps if step == step]
            panels.append(lines(losses, f"{name}: {answer}", "loss (nats)", log_y=True, lines=bounds))
    whole = by_answer.get("", {})
    if "gini of W_E" in whole:
        of_answers = {answer: of["gini of W_L"] for answer, of in by_answer.items() if "gini of W_L" in of}
        several = len(of_answers) > 1
        ginis = {f"gini of W_L, {of}" if several else "gini of W_L": each for of, each in of_answers.items()}
        panels.append(
            lines({"gini of W_E": whole["gini of W_E"], **ginis}, f"{name}: Gini coefficients", "Gini")
        )
    if SQUARES in whole:
        panels.append(lines({SQUARES: whole[SQUARES]}, f"{name}: weights", "sum of squares"))
    return panels


def lines(curves: Curves, title: str, y: str, log_y: bool = False, **panel: Any) -> Panel:
    looks = {name: at for at, name in enumerate(LOSSES.values())}
    series = {}
    for at, (name, values) in enumerate(curves.items()):
        steps = sorted(values)
        shown = [max(values[step], SMALLEST) if log_y else values[step] for step in steps]
        series[name] = Series(steps, shown, look=looks.get(name, at))
    return curve(series, title, y=y, log_y=log_y, height=280, width=300, **panel)
