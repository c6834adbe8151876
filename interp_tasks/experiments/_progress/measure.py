"""Progress measures of modular arithmetic (Nanda et al. 2023), for each modular answer of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import RULES, THRESHOLD, check_kinds, read_rule
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    PendingCheckpoint,
    by_run,
    check_has_task,
    in_runs,
    resolve_refs,
    run_of,
    trained_on,
)

if TYPE_CHECKING:
    import plotly.graph_objects
    from torch import Tensor
    from typing_extensions import Unpack

    from interp_tasks.experiments._progress.inputs import Answer, Inputs
    from interp_tasks.experiments._progress.logits import Row
    from interp_tasks.measurement.subjects import LabelledRef
    from tasks import Task

#: What is measured of every checkpoint, and of the last one of each run alone.
CURVES, MECHANISM = ("losses", "gini", "weights"), ("map", "neurons", "attention", "skips")
KINDS = (*CURVES, *MECHANISM)
#: Rules by name, with their usual number: those of ``fourier``, of W_L, and one of the neurons.
CLUSTERS = "clusters"
KEY_RULES = {**RULES, CLUSTERS: THRESHOLD}
USUAL = "of-largest"


@dataclass(frozen=True, repr=False)
class ProgressResult(Result):
    """A :class:`Result` with the curves and coefficients of its figure.

    Attributes:
        curves: run -> answer (or ``""`` for the whole model) -> quantity -> step -> value.
        coefficients: REF -> answer -> frequency -> coefficient of cos w(r - c) in the logits, of the last checkpoints.
        keys: run -> answer -> key frequencies.
        runs_of: REF -> run, of the last checkpoints.
    """

    curves: Mapping[str, Mapping[str, Mapping[str, Mapping[int, float]]]] = field(default_factory=dict)
    coefficients: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    keys: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    runs_of: Mapping[str, str] = field(default_factory=dict)

    def plot(self) -> plotly.graph_objects.Figure:
        """Draws curves over training where a run has several checkpoints, then the last one's frequencies."""
        from interp_tasks.experiments._progress.figure import figure

        return figure(self.frame, self.curves, self.coefficients, self.keys, self.runs_of)

    def heading(self) -> str:
        return "Progress measures"

    def caption(self) -> str:
        return (
            "Restricted loss: on all inputs, key frequencies kept alone; held out: on test inputs, fitted on others. "
            "Excluded loss: on training inputs, without "
            "them. Dotted lines: boundaries of the phases. Bars: coefficients of cos w(r − c) in the logits, key "
            "frequencies in the second colour. Points: the loss on all inputs without one key frequency."
        )


@experiment("modular", says={"rule": None, "keys": None, "answers": [], "train": None, "kinds": []})
def progress(
    refs: str | Sequence[str],
    *,
    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            metavar="NAME[=NUMBER]",
            help="Which frequencies are key: of W_L by noise, of-largest, above-mean or preferred; of neurons by "
            "clusters.",
        ),
    ] = USUAL,
    keys: Annotated[
        Sequence[int] | None,
        typer.Option("--keys", metavar="3,24", help="These frequencies instead."),
        str | None,
        read_keys,
    ] = None,
    answers: Annotated[
        str | Sequence[str],
        typer.Option(
            "--answer",
            metavar="NAME",
            help="Only this answer of the task, such as mod_7; repeat for several.",
            show_default="all",
        ),
        list[str],
    ] = (),
    kinds: Annotated[
        str | Sequence[str],
        typer.Option(
            "--kind",
            metavar="NAME",
            help=f"Measure these: {', '.join(KINDS)}; repeat for several.",
            show_default="all",
        ),
        list[str],
    ] = (),
    train: Annotated[
        Any,
        typer.Option(
            "--train-inputs",
            metavar="FILE.npy",
            help="What the model was trained on, where its checkpoint does not say: indices of the grid's inputs, "
            "such as a·p + b, or a mask.",
        ),
        str | None,
    ] = None,
    **options: Unpack[Options],
) -> ProgressResult:
    """See how far a model of modular arithmetic has come: Nanda et al.'s progress measures, for each answer.

    Restricted and excluded loss, cosines in the logits, Gini coefficients, weight norms, W_L and neurons by frequency,
    attention as waves of the digits, losses without attention or MLP; of a run's checkpoints the phases too.

    From all inputs of the grid, at the position where the output is read, and the answer's own classes. ``losses``:
    restricted, excluded (all keys, one at a time, the worst single frequency), of the fitted cosines; cross-entropy in
    nats. Restricted logits and cosines are fitted on all inputs, as published, and held out: on other inputs of the
    same split than those that are scored. ``gini``, ``weights``: of every checkpoint, too. ``map`` (W_L by frequency),
    ``neurons`` (frequencies removed and in the logits), ``attention`` (as waves of the digits), ``skips``: of the last
    checkpoint given of each run.

    Args:
        refs: one or several REFs; four or more of a run give its phases (see
            :mod:`interp_tasks.experiments._progress.phases`).
        rule: which frequencies are key, as in ``fourier``, of W_L = W_U·W_out over the answer's classes; or
            ``"clusters"``: those that explain more than 0.85 of the variance of at least one neuron of the last layer.
            They are taken from the last checkpoint that the run has stored, whichever are given, and used at all.
        keys: these frequencies instead; for a single answer.
        answers: some of the task's modular answers; none: all.
        kinds: some of ``KINDS``; none: all.
        train: the training inputs, where the checkpoints do not say what they were trained on; the others are test
            inputs. Indices of the grid's inputs (the last coordinate varies fastest: a·p + b), a mask of all of them,
            or an ``.npy`` file of either.
        options: seed, task, task_config, device, progress: see :class:`Options`. Nothing is sampled.

    Returns:
        A :class:`ProgressResult`. The ``variant`` is the answer, or a frequency of it; rows under an edit have the
        unedited model's value as ``baseline``.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without modular answers.
    """
    name, number = read_key_rule(rule, keys)
    chosen_kinds = check_kinds([kinds] if isinstance(kinds, str) else kinds, KINDS)
    wanted = [answers] if isinstance(answers, str) else list(answers)
    if keys is not None and not all(isinstance(key, int) for key in keys):
        raise UserError(f"keys {keys!r}: give frequencies, whole numbers from 1, such as (3, 24)")
    chosen = None if keys is None else tuple(keys)
    check_has_task("progress", options)
    found = resolve_refs(refs, Examples.of(options))
    runs = by_run(found.named)
    followed = {run: RunMeasures(named) for run, named in runs.items()}
    tables: dict[Any, Inputs] = {}
    unknown: list[str] = []
    inputs_of: dict[Any, Any] = {}
    splits: list[str] = []

    def check(planned: PendingCheckpoint) -> None:
        own_split = train is None and trained_on(planned.named, planned.task)
        if train is None and not own_split:
            unknown.append(planned.named.label)
        inputs_of[planned.named.resolved.path, planned.task] = key = (planned.task, own_split)
        if key not in tables:
            tables[key] = read_inputs_of(planned.task, wanted, chosen, train, own_split)

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures the progress of one checkpoint, by the key frequencies of its run's last one."""
        import pandas

        inputs = tables[inputs_of[subject.checkpoint.path, subject.task]]
        run_measures = followed[run_of(subject)]
        if not run_measures.keys:
            run_measures.keys = final_keys(
                run_measures.final(), options.get("device", "cpu"), inputs, name, number, chosen
            )
        rows = run_measures.measure(subject, inputs, chosen_kinds)
        splits.extend(row["split"] for row in rows)
        return Measured(
            pandas.DataFrame(rows),
            {"keys": {one: list(frequencies) for one, frequencies in run_measures.keys.items()}},
        )

    config = {
        "rule": f"{name}={number:g}" if chosen is None else None,
        "keys": None if chosen is None else list(chosen),
        "keys from": "the last checkpoint stored of each run",
        "answers": wanted,
        "train": train if train is None or isinstance(train, str) else "given",
        "kinds": list(chosen_kinds) if kinds else [],
    }
    result = measure("progress", in_runs(runs), options, measure_checkpoint, config=config, check=check)
    given = {"refs": list(found)}
    # A row says which inputs it is of, not what its checkpoint's examples were drawn from.
    result.frame["split"] = splits
    return ProgressResult.of(
        result,
        config={**result.config, **given},
        notes=(*notes(followed, name, number, chosen), *notes_on_splits(unknown)),
        curves={run: one.curves for run, one in followed.items()},
        coefficients={
            ref: coefficients for one in followed.values() for ref, coefficients in one.coefficients.items()
        },
        keys={run: one.keys for run, one in followed.items()},
        runs_of={ref: run for run, one in followed.items() for ref in one.coefficients},
    )


def read_key_rule(rule: str, keys: Sequence[int] | None = None) -> tuple[str, float]:
    """Returns a rule's name and number.

    Raises:
        UserError: for a rule there is not, for no number; for a rule beside keys, which it would not decide.
    """
    name, number = read_rule(rule, KEY_RULES)
    if name == CLUSTERS and number > 1:
        raise UserError(f"--rule {rule}: after = comes a share of a neuron's variance, from 0 to 1")
    if keys is not None and rule != USUAL:
        raise UserError(
            f"--keys are the key frequencies whatever --rule {rule} says: leave one of the two out"
        )
    return name, number


def read_keys(text: str | None) -> tuple[int, ...] | None:
    """Parses frequencies from ``3,24``.

    Raises:
        UserError: for what is none.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10**6 for part in parts):
        raise UserError(f"--keys {text!r}: write frequencies from 1, such as 3,24")
    return tuple(dict.fromkeys(map(int, parts)))


def read_inputs_of(
    task: Task | None, answers: Sequence[str], keys: tuple[int, ...] | None, train: Any, own_split: bool
) -> Inputs:
    """Returns the inputs of a task with the chosen answers; refuses several where keys are given."""
    from interp_tasks.experiments._progress.inputs import read_inputs

    inputs = read_inputs(task, answers, train, own_split=own_split)
    if keys is not None and len(inputs.answers) > 1:
        raise UserError(
            f"--keys are of one answer, this task has {len(inputs.answers)}: choose one by --answer, such as "
            f"{inputs.answers[0].name}"
        )
    return inputs


def final_keys(
    ref: str, device: str, inputs: Inputs, name: str, number: float, chosen: tuple[int, ...] | None
) -> dict[str, tuple[int, ...]]:
    """Returns the key frequencies of each answer, of W_L or of the neurons in one checkpoint."""
    from circuits.fourier import key_frequencies, spectrum
    from circuits.fourier._key_frequencies import RULES as MADE
    from interp_tasks.checkpoints import load_checkpoint
    from interp_tasks.experiments._progress.neurons import w_l

    if chosen is not None:
        return {answer.name: chosen for answer in inputs.answers}
    model = load_checkpoint(ref, device=device).model
    weights = w_l(model)
    if name == CLUSTERS:
        (neurons,) = activations(model, inputs, ["mlp_post"])[1].values()
        sizes = {answer.name: answer.sum.clusters(neurons, number).sizes for answer in inputs.answers}
        return {answer: tuple(int(key) for key in keys_of_answer) for answer, keys_of_answer in sizes.items()}  # type: ignore[arg-type]
    keys_of_answer = {}
    for answer in inputs.answers:
        keys = key_frequencies(spectrum(weights[:, answer.classes], axis=1), MADE[name](number)).keys
        keys_of_answer[answer.name] = tuple(key for key in keys if isinstance(key, int))
    return keys_of_answer


@dataclass
class RunMeasures:
    """One run over its checkpoints."""

    named: Sequence[LabelledRef]
    keys: dict[str, tuple[int, ...]] = field(default_factory=dict)
    curves: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    coefficients: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def final(self) -> str:
        """Returns the REF of the last checkpoint that the run has stored."""
        one = self.named[-1].resolved
        return one.ref if one.run_name is None else f"{one.run_name}@last"

    def measure(self, subject: LoadedCheckpoint, inputs: Inputs, kinds: Sequence[str]) -> list[Row]:
        """Returns the rows of one checkpoint; of the last one those of the whole run too."""
        from interp_tasks.experiments._progress.inputs import ALL
        from interp_tasks.experiments._progress.logits import rows_of_losses, rows_of_weights
        from interp_tasks.experiments._progress.neurons import rows_of_concentration

        last = subject.checkpoint.path == self.named[-1].resolved.path
        sites = [site for kind, site in SITES.items() if kind in kinds and last]
        logits, seen = activations(subject.model, inputs, sites)
        rows: list[Row] = []
        for answer in inputs.answers:
            keys = self.keys[answer.name]
            answer_logits = logits[:, answer.classes]
            if "losses" in kinds:
                rows += rows_of_losses(inputs, answer, answer_logits, keys)
            if "gini" in kinds:
                rows += rows_of_concentration(subject.model, answer, keys)
            if last:
                coefficients = self.coefficients.setdefault(str(subject.labels["ref"]), {})
                coefficients[answer.name] = answer.sum.cosines(answer_logits).coefficients.tolist()
        weights = list(rows_of_weights(subject.model, digits(subject)))
        rows += [row for row in weights if ("gini" if row["metric"] == "gini" else "weights") in kinds]
        self.follow(rows, subject.checkpoint.step)
        if last:
            rows += self.mechanism(subject, inputs, kinds, logits, seen)
            rows += self.phases()
        for row in rows:
            row["n"] = len(inputs.splits[row.setdefault("split", ALL)])
        return rows

    def mechanism(
        self,
        subject: LoadedCheckpoint,
        inputs: Inputs,
        kinds: Sequence[str],
        logits: Tensor,
        seen: Mapping[str, Tensor],
    ) -> list[Row]:
        """Returns the rows that look inside one checkpoint: the neurons' map, removals, attention, skips."""
        from interp_tasks.experiments._progress.attention import (
            rows_of_attention,
            rows_of_skips,
            rows_of_waves,
        )
        from interp_tasks.experiments._progress.neurons import Neurons, rows_of_map, rows_of_removal

        rows: list[Row] = []
        model = subject.model
        if {"map", "neurons"} & set(kinds):
            layer = model.cfg.n_layers - 1
            neurons = Neurons.of(model, inputs, logits, seen[f"mlp_post.{layer}"])
            for answer in inputs.answers:
                keys = self.keys[answer.name]
                if "map" in kinds:
                    rows += rows_of_map(neurons, answer, keys, embedding_norms(subject, answer))
                if "neurons" in kinds and keys:
                    rows += rows_of_removal(neurons, answer, keys)
        if "attention" in kinds:
            patterns = {layer: seen[f"pattern.{layer}"] for layer in range(model.cfg.n_layers)}
            rows += rows_of_attention(inputs, patterns)
            rows += rows_of_waves(model, inputs, patterns, logits)
        if "skips" in kinds:
            rows += rows_of_skips(model, inputs, logits)
        return rows

    def follow(self, rows: Sequence[Row], step: int) -> None:
        """Stores the values that the phases and the figure are made of."""
        from interp_tasks.experiments._progress import table
        from interp_tasks.experiments._progress.inputs import ALL, TEST, TRAIN

        names = {
            (table.NONE, TRAIN): "train loss",
            (table.NONE, TEST): "test loss",
            (table.RESTRICTED, ALL): "restricted loss",
            (table.RESTRICTED_HELD_OUT, TEST): "held-out restricted loss",
            (table.EXCLUDED, TRAIN): "excluded loss",
        }
        for row in rows:
            answer, quantity = row["variant"], None
            if row["metric"] == table.LOSS:
                quantity = names.get((row["intervention"], row["split"]))
            elif row["metric"] == table.GINI:
                quantity = "gini of W_E" if row["site"] == "embed" else "gini of W_L"
            elif row["metric"] == table.SQUARES and answer == table.ALL_WEIGHTS:
                quantity = table.SQUARES
            if quantity is None or ", frequency " in answer:
                continue
            answer = "" if quantity in ("gini of W_E", table.SQUARES) else answer
            self.curves.setdefault(answer, {}).setdefault(quantity, {})[step] = row["value"]

    def phases(self) -> list[Row]:
        """Yields boundaries of each answer's phases, changes in each, and the half-way step of each curve."""
        from interp_tasks.experiments._progress import table
        from interp_tasks.experiments._progress.phases import MIN_STEPS, begins, changes, find_phases, made

        rows: list[Row] = []
        main_curves = self.curves.get("", {})
        for answer, answer_curves in self.curves.items():
            if (
                not {"train loss", "test loss"} <= set(answer_curves)
                or len(answer_curves["test loss"]) < MIN_STEPS
            ):
                continue
            steps, curves = sorted(answer_curves["test loss"]), {**answer_curves, **main_curves}
            lines = {name: [curve[step] for step in steps] for name, curve in curves.items()}
            phases = find_phases(steps, lines["train loss"], lines["test loss"])
            for name, step in (
                ("memorisation ends", phases.memorised),
                ("cleanup begins", phases.cleanup),
                ("cleanup ends", phases.end),
            ):
                row = {"variant": answer, "intervention": table.BOUNDARY, "metric": f"{table.STEP}: {name}"}
                rows.append({**row, "value": step})
            half = made(steps, lines["test loss"], 0.5, "max")
            for name, line in lines.items():
                for phase, (first, after) in changes(steps, line, phases).items():
                    row = {"variant": answer, "intervention": phase, "metric": f"change of {name}"}
                    rows.append({**row, "value": after - first, "baseline": first})
                step = made(steps, line, 0.5, begins(name))
                row = {"variant": answer, "intervention": table.HALF, "metric": f"{table.STEP}: {name}"}
                rows.append({**row, "value": step, "baseline": half, "effect": step - half})
        return rows


#: Kind -> what has to be recorded for it.
SITES = {"map": "mlp_post", "neurons": "mlp_post", "attention": "pattern"}


def activations(model: Any, inputs: Inputs, sites: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns float64 logits ``[input output]``, and at the read position the last layer's neurons and all patterns."""
    import torch

    from circuits import run
    from interp_tasks.experiments._progress.inputs import passes

    layers = model.cfg.n_layers
    named = [f"mlp_post.{layers - 1}"] if "mlp_post" in sites else []
    named += [f"pattern.{layer}" for layer in range(layers)] if "pattern" in sites else []
    logits: list[Tensor] = []
    values: dict[str, list[Tensor]] = {name: [] for name in named}
    for tokens in passes(model, inputs):
        output, seen = run(model, tokens, cache=named)
        logits.append(output[:, inputs.position].double().cpu())
        for name in named:
            # A pattern is [input head query key], neurons are [input pos neuron].
            axis = 2 if name.startswith("pattern") else 1
            values[name].append(seen[name].select(axis, inputs.position).cpu().clone())
    return torch.cat(logits), {name: torch.cat(parts) for name, parts in values.items()}


def digits(subject: LoadedCheckpoint) -> tuple[int, ...]:
    """Returns the token ids of the first coordinate."""
    assert subject.task is not None
    return subject.task.grid_axes()[0].values


def embedding_norms(subject: LoadedCheckpoint, answer: Answer) -> dict[int, float] | None:
    """Returns the norm of each frequency in W_E; ``None`` where the answer's period is not that of the digits."""
    from circuits.fourier import spectrum

    ids = list(digits(subject))
    if len(ids) != answer.sum.period:
        return None
    norms = spectrum(subject.model.W_E[ids]).total()
    return {key: float((norms.power[key] * len(ids)).sqrt()) for key in answer.sum.frequencies}


def notes_on_splits(unknown: Sequence[str]) -> list[str]:
    """Returns what the splits are, or of which checkpoints they are not known."""
    held_out = (
        "Restricted logits and cosines are fitted on all inputs, as published; held out: on other inputs of the same "
        "split than those that are scored."
    )
    if not unknown:
        return [held_out]
    return [
        f"{', '.join(unknown)}: no train or test, nothing held out, as the checkpoint does not say what it was trained "
        "on: state it by --train-inputs FILE.npy."
    ]


def notes(
    followed: Mapping[str, RunMeasures], name: str, number: float, chosen: tuple[int, ...] | None
) -> Sequence[str]:
    """Returns the notes below the table; they say which frequencies are key, and by which rule."""
    from circuits.fourier._key_frequencies import RULES as MADE

    texts = ["Over all inputs of the grid: nothing is sampled. loss: cross-entropy in nats."]
    for one in followed.values():
        run = one.named[-1].resolved.run_name or one.named[-1].label
        listed = "; ".join(
            f"{answer} {', '.join(map(str, keys)) or 'none'}" for answer, keys in one.keys.items()
        )
        texts.append(f"Key frequencies of {run}: {listed}.")
    if chosen is None and name == CLUSTERS:
        texts.append(
            f"key: more than {number:g} of the variance of at least one neuron; of the last layer's neurons over all "
            "inputs, in the last checkpoint that the run has stored, for all checkpoints."
        )
    elif chosen is None:
        texts.append(
            f"{MADE[name](number).statement}; of W_L over the answer's classes, in the last checkpoint that the run "
            "has stored, for all checkpoints."
        )
    return texts
