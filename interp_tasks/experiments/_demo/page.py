"""The page of the demo: its story in pictures, the tables folded below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import find_marks, resolve
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.experiments._demo import figure as draw
from interp_tasks.experiments._demo.measure import OPERANDS, Demo, Outcome, guessing, judged_claims, reading
from interp_tasks.measurement.run_logs import Run, plateau_levels
from interp_tasks.measurement.table import shown_columns
from interp_tasks.pages import (
    Beside,
    Chapter,
    Choice,
    Column,
    Controls,
    Figure,
    Fold,
    Page,
    Section,
    Slider,
    Stepped,
    Table,
    Text,
    number,
)

if TYPE_CHECKING:
    import pandas

#: Words of the page that lead to a paper.
PAPERS = {
    "Abrupt Learning in Transformers: A Case Study on Matrix Completion": "https://arxiv.org/abs/2410.22244",
    "Progress measures for grokking via mechanistic interpretability": "https://arxiv.org/abs/2301.05217",
}
TITLE = "Two small transformers plateau, then learn: what do they need attention for?"
#: Pixels: how wide bars are at most.
BARS_WIDTH = 900
#: Names of the page's controls.
STEP, MATRIX = "checkpoint", "matrix"
SUM_STEP, SUM, EDIT = "checkpoint of sums", "sum", "edit"
#: What the whiskers of bars are.
INTERVALS = "Whiskers are 95% intervals, by bootstrap over examples."
#: What the marks around a drop are called here; the braces are for "drop" or "rise".
MARKS = {"pre": "before the {}", "onset": "{} begins", "end": "{} ends", "post": "after the {}"}


def demo_page(found: Demo) -> Page:
    """Returns a page with a chapter for each model."""
    results = {each.title: each.result.config for each in (found.matrices, found.sums)}
    opening = Text(f"{finding(found)} Move the sliders to see how that came about.")
    closing = Text(
        "The curves come from the training logs; `interp-run demo` has just measured everything else, on two models "
        "that ship with this package."
    )
    return Page(TITLE, [opening, matrix_chapter(found), sum_chapter(found), closing], results)


def finding(found: Demo) -> str:
    """Returns what uniform attention does to both models after their training, in numbers."""
    blanks = found.matrices.row("post", "mse_masked")
    answers = found.sums.row("post", "accuracy")
    meaning = (
        ", as much as always answering 0; what it is given it still copies"
        if holds_throughout(found.matrices)
        else ""
    )
    return (
        f"The first fills in the blanks of matrices, with an error of {draw.short(blanks['baseline'])} after training. "
        "When every head is made to look at all positions equally (uniform attention) it errs by "
        f"{draw.short(blanks['value'])}{meaning}. The second adds numbers: {answers['baseline']:.0%} of its answers "
        f"are right, {answers['value']:.0%} under uniform attention."
    )


def matrix_chapter(found: Demo) -> Section:
    """Returns the chapter of the page about matrix completion."""
    import tasks

    outcome, filled = found.matrices, found.filled
    rows, columns = filled.truth.shape[1:]
    hidden = outcome.config["p_mask"]
    # The defaults of the task's model are the paper's.
    published, own = tasks.get("matrix-completion").Model().d_model, width(outcome)
    intro = Text(
        f"The model sees a {rows}×{columns} matrix of rank {outcome.config['rank']} with about {hidden:.0%} of its "
        f"entries blank, and fills these in. It is {own} wide; the one that Gopalani, Lubana and Hu (NeurIPS 2024) "
        f"studied is {published} wide: Abrupt Learning in Transformers: A Case Study on Matrix Completion.",
        links=PAPERS,
    )
    slider = checkpoints(filled.steps, outcome, STEP)
    names = [f"matrix {index + 1} of {len(filled.truth)}" for index in range(len(filled.truth))]
    choice = Choice(names, MATRIX, "Matrix", onward="Another matrix")
    return Chapter(
        "Filling in the blanks of a matrix",
        [
            intro,
            Controls([slider, choice]),
            loss_curve(found),
            matrix_pictures(found),
            error_bars(found),
            Fold("The paper's claims, each by a rule that was written beforehand", [claims_table(outcome)]),
            Fold("All numbers", [numbers_table(outcome)]),
        ],
    )


def sum_chapter(found: Demo) -> Section:
    """Returns the chapter of the page about modular addition."""
    outcome, answered = found.sums, found.answered
    modulus = answered.modulus
    intro = Text(
        f"The model sees two numbers below {modulus} and has to give their sum modulo {modulus}, the remainder after "
        f"division by {modulus}. It was trained on {outcome.config['train_fraction']:.0%} of all pairs and is tested "
        "on the others. Nanda, Chan, Lieberum, Smith and Steinhardt (ICLR 2023) worked out how such a model does it: "
        "Progress measures for grokking via mechanistic interpretability.",
        links=PAPERS,
    )
    names = [f"{a} + {b}" for a, b in answered.operands]
    return Chapter(
        "Adding on a clock",
        [
            intro,
            Controls(
                [
                    checkpoints(answered.steps, outcome, SUM_STEP),
                    Choice(names, SUM, "Sum", onward="Another sum"),
                    Choice([draw.TRAINED, draw.UNIFORM], EDIT, "Attention"),
                ]
            ),
            accuracy_curve(found),
            Beside([ring(found), heads_look(found)], narrowest=26),
            accuracy_bars(found),
            Fold("All numbers", [numbers_table(outcome)]),
        ],
    )


def width(outcome: Outcome) -> int:
    return int(read_meta(resolve(f"{outcome.log.name}@last")[0].path)["model"]["d_model"])


def checkpoints(steps: Sequence[int], outcome: Outcome, name: str) -> Slider:
    """Returns a slider over all checkpoints of a run, with a button for each mark; it starts at the end."""
    marks = {
        MARKS[mark].format(turn(outcome)): list(steps).index(step)
        for mark, step in find_marks(outcome.log.path, outcome.log.name).items()
        if step in steps
    }
    labels = [f"step {step:,}" for step in steps]
    return Slider(labels, marks, len(labels) - 1, name)


def turn(outcome: Outcome) -> str:
    """Returns what the sudden change of a run's own metric is: an error drops, a share of right answers rises."""
    return "drop" if outcome.log.direction == "down" else "rise"


def counted(log: Run, what: str) -> str:
    """Returns what a run's curve is over, with their number where the run says it."""
    number_of = log.labels()["n"]
    return what if number_of is None else f"{number_of:,} {what}"


def loss_curve(found: Demo) -> Section:
    """Draws the error of matrix completion over training, beside what answering 0 at the blanks errs by."""
    outcome, steps = found.matrices, found.filled.steps
    log, guess = outcome.log, guessing(outcome.config)
    level = plateau_levels(log).get("mse_masked", guess)
    drop = log.curve("mse_masked").drop
    figure = draw.curve(
        {"blanks": log.points("mse_masked"), "given entries": log.points("mse_observed")},
        None if drop is None else (drop.onset, drop.end),
        level,
        f"theory, answering 0 at every blank: {number(level)}",
        "mean squared error",
    )
    if drop is None:
        told = "The error shows no drop."
    else:
        told = (
            f"On {counted(log, 'new matrices')} the error at the blanks stays near {number(drop.plateau)} until step "
            f"{drop.onset:,} and has made nine tenths of its fall by step {drop.end:,} (grey)."
        )
    caption = f"{told} Dotted: the variance of the entries, which is the error of answering 0."
    return along(figure, caption, "error over training", steps, STEP)


def along(figure: Any, caption: str, alt: str, steps: Sequence[int], slider: str) -> Stepped:
    """Returns a curve with a line at the slider's step; a click moves the slider there."""
    ends = {f"layout.shapes.0.{end}": list(steps) for end in ("x0", "x1")}
    return Stepped(
        Figure(figure, caption=caption, alt=alt), ends, range(len(steps)), picks=steps, follows=(slider,)
    )


def matrix_pictures(found: Demo) -> Section:
    """Returns a matrix as it is given and as it is, as the model fills it in, and as it does with uniform attention."""
    filled = found.filled
    count, steps = len(filled.truth), len(filled.steps)
    largest = float(abs(filled.truth).max())

    def still(values: Any, title: Any, alt: str, blank: bool = False) -> Stepped:
        figure = draw.matrix(values[0], filled.hidden[0], largest, blank)
        pairs = [draw.split(values[index], filled.hidden[index]) for index in range(count)]
        moves: dict[str, Any] = {
            "data.0.z": [given for given, _ in pairs],
            "data.1.z": [hidden for _, hidden in pairs],
        }
        moves["layout.title.text"] = [title(index) for index in range(count)]
        if blank:
            moves["data.1.text"] = [draw.marks(hidden) for hidden in filled.hidden]
        return Stepped(Figure(figure, alt=alt), moves, range(count), follows=(MATRIX,))

    def moving(outputs: Any, title: str, alt: str) -> Stepped:
        figure = draw.matrix(outputs[0, 0], filled.hidden[0], largest)
        frames = list(product(range(steps), range(count)))
        pairs = [draw.split(outputs[step, index], filled.hidden[index], 2) for step, index in frames]
        moves: dict[str, Any] = {
            "data.0.z": [given for given, _ in pairs],
            "data.1.z": [hidden for _, hidden in pairs],
        }
        moves["layout.title.text"] = [
            f"{title}: error {draw.short(filled.error(outputs, step, index))}" for step, index in frames
        ]
        return Stepped(Figure(figure, alt=alt), moves, range(len(frames)), follows=(STEP, MATRIX))

    def blanks(index: int) -> str:
        return f"Given: {int(filled.hidden[index].sum())} of {filled.hidden[index].size} are blank"

    total = outcome_count(found.matrices)
    caption = (
        "Given entries are pale, blanks strong; the error above a picture is that at its own blanks. "
        f"{count} of {total} test matrices can be seen, evenly spaced in the order of their error after training; the "
        "first has the median error."
    )
    return Beside(
        [
            Beside(
                [
                    still(filled.truth, blanks, "the matrix with its blanks", blank=True),
                    still(filled.truth, lambda _: "The truth", "the whole matrix"),
                ],
                narrowest=14,
            ),
            Beside(
                [
                    moving(filled.trained, "Filled in", "what the model makes of it"),
                    moving(filled.uniform, "Uniform attention", "the same with uniform attention"),
                ],
                narrowest=14,
            ),
        ],
        caption=caption,
        narrowest=32,
    )


def outcome_count(outcome: Outcome) -> int:
    """Returns over how many matrices an outcome is."""
    return int(outcome.row("post", "mse_masked")["n"])


def moments(outcome: Outcome, metric: str) -> list[str]:
    return [
        f"{'before' if mark == 'pre' else 'after'} {turn(outcome)}<br>step {outcome.row(mark, metric)['step']:,}"
        for mark in ("pre", "post")
    ]


def points(outcome: Outcome, metric: str, interventions: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the unedited model and the edits, before and after the drop, as bars show them."""
    plain = [outcome.unedited[mark][metric] for mark in ("pre", "post")]
    names = {"uniform": draw.UNIFORM, OPERANDS: "uniform over the two numbers alone"}
    edited: dict[str, list[Mapping[str, Any]]] = {
        names[name]: [outcome.row(mark, metric, name) for mark in ("pre", "post")] for name in interventions
    }
    return {draw.TRAINED: plain, **edited}


def error_bars(found: Demo) -> Section:
    """Draws the errors before and after the drop, with and without uniform attention, as bars."""
    outcome = found.matrices
    level = guessing(outcome.config)
    panels = {
        "at the blanks; dashed: always 0": points(outcome, "mse_masked", ["uniform"]),
        "at the given entries": points(outcome, "mse_observed", ["uniform"]),
    }
    before, after, given = (
        outcome.row(mark, metric)
        for mark, metric in (("pre", "mse_masked"), ("post", "mse_masked"), ("post", "mse_observed"))
    )
    figure = draw.bars(panels, moments(outcome, "mse_masked"), level, "mean squared error")
    numbers = (
        f"With uniform attention, on {after['n']} test matrices, others than those of the training log, the error at "
        f"the blanks {moved(before)} before the drop, and {moved(after)} after it, where always answering 0 errs by "
        f"{draw.short(level)} (dashed). At their given entries, after the drop, it {moved(given)}, "
        f"{given['value'] / given['baseline']:.1f} times as much and {given['value'] / level:.1%} of the "
        f"variance. {INTERVALS}"
    )
    meaning = (
        " So this model needs attention to fill in, and hardly to copy; two small shipped models do not copy without "
        "it."
        if holds_throughout(outcome)
        else ""
    )
    alt = "errors with and without uniform attention, before and after the drop"
    return Figure(figure, caption=f"{numbers}{meaning}", alt=alt, width=BARS_WIDTH)


def moved(row: Mapping[str, Any]) -> str:
    """Says where an error goes; what the page would show as the same number stays."""
    before, after = draw.short(row["baseline"]), draw.short(row["value"])
    return f"stays at {before}" if before == after else f"goes from {before} to {after}"


def holds_throughout(outcome: Outcome) -> bool:
    """Returns whether all published claims on uniform attention hold by their rules."""
    rows = [row for row in judged_claims(outcome.result.frame, outcome.config) if row["edit"] == "uniform"]
    return all(row["verdict"] == "holds" for row in rows)


def accuracy_curve(found: Demo) -> Section:
    """Draws the share of right sums over training, of sums it was trained on and of others."""
    outcome, steps = found.sums, found.answered.steps
    log, chance = outcome.log, 1 / found.answered.modulus
    curve = log.curve("accuracy")
    train = log.points("accuracy", "train")
    figure = draw.curve(
        {"sums it was not trained on": (curve.steps, curve.values), "sums it was trained on": train},
        None if curve.drop is None else (curve.drop.onset, curve.drop.end),
        chance,
        f"chance: {chance:.1%}",
        "share of right answers",
    )
    figure.update_yaxes(tickformat=".0%")
    learnt = next((step for step, value in zip(*train, strict=True) if value >= 0.99), None)
    told = [] if learnt is None else [f"By step {learnt:,} it has memorised its training sums."]
    if curve.drop is None:
        told.append(f"On {counted(log, 'others')} its share of right answers shows no jump.")
    else:
        told.append(
            f"On {counted(log, 'others')} it gets few right until step {curve.drop.onset:,}, and has made nine "
            f"tenths of its rise by step {curve.drop.end:,} (grey)."
        )
    return along(figure, " ".join(told), "share of right answers over training", steps, SUM_STEP)


def ring(found: Demo) -> Section:
    """Draws the embeddings of the numbers along their key frequency, which the slider moves."""
    ring, steps = found.ring, found.answered.steps
    figure = draw.ring(ring.points[-1], ring.phases, 1.3 * float(abs(ring.points).max()), ring.frequency)
    order = draw.around(ring.phases)
    rounded = [[[float(f"{value:.4g}") for value in point] for point in each] for each in ring.points]
    moves: dict[str, Any] = {}
    for at, axis in enumerate("xy"):
        moves[f"data.0.{axis}"] = [[each[digit][at] for digit in order] for each in rounded]
        moves[f"data.1.{axis}"] = [[point[at] for point in each] for each in rounded]
        moves[f"data.2.{axis}"] = [
            [round(draw.OUTSIDE * point[at], 4) for point in each[: draw.LABELLED]] for each in rounded
        ]
    moves["layout.title.text"] = [
        f"Embeddings of 0 to {len(ring.phases) - 1}: {share:.0%} of their variance is seen here"
        for share in ring.shares
    ]
    caption = (
        f"Frequency {ring.frequency} holds {ring.shares[0]:.0%} of the variance of the embeddings at step "
        f"{steps[0]:,} and {ring.shares[-1]:.0%}, the largest share, at step {steps[-1]:,}. Colours follow the angle: "
        f"number x stands at {ring.frequency} · x / {found.answered.modulus} of a turn, so that adding numbers adds "
        "angles."
    )
    return Stepped(
        Figure(figure, caption=caption, alt="embeddings of the numbers along their key frequency"),
        moves,
        range(len(steps)),
        follows=(SUM_STEP,),
    )


def heads_look(found: Demo) -> Section:
    """Draws where each head looks when the model answers a sum, by checkpoint, sum and edit."""
    answered = found.answered
    frames = list(product(range(len(answered.steps)), range(len(answered.right)), (0, 1)))
    figure = draw.attention(*answered.looks.shape[3:])
    moves: dict[str, Any] = {
        "data.0.z": [
            [[round(float(value), 3) for value in head] for head in answered.looks[step, edit, index]]
            for step, index, edit in frames
        ],
        "layout.xaxis.ticktext": [[*map(str, answered.operands[index]), "="] for _, index, _ in frames],
        "layout.title.text": [sum_text(found, *frame) for frame in frames],
    }
    caption = (
        "Where each head looks when the model answers this sum. The buttons above switch all heads to uniform "
        "attention and back."
    )
    return Stepped(
        Figure(figure, caption=caption, alt="attention of every head and the answer"),
        moves,
        range(len(frames)),
        follows=(SUM_STEP, SUM, EDIT),
    )


def sum_text(found: Demo, step: int, index: int, edit: int) -> str:
    """Returns the edit, the sum and the model's answer to it."""
    answered = found.answered
    a, b = answered.operands[index]
    said, right = int(answered.said[step, edit, index]), int(answered.right[index])
    judged = f"{said}, right" if said == right else f"{said}, wrong: it is {right}"
    name = (draw.TRAINED, draw.UNIFORM)[edit].capitalize()
    return f"{name}, {a} + {b}: it says {judged}"


def accuracy_bars(found: Demo) -> Section:
    outcome = found.sums
    chance = 1 / found.answered.modulus
    panels = {f"dashed: chance, {chance:.1%}": points(outcome, "accuracy", ["uniform", OPERANDS])}
    figure = draw.bars(panels, moments(outcome, "accuracy"), chance, "share of right answers", percent=True)
    count = outcome.row("post", "accuracy")["n"]
    trained, other = found.mirrored
    order = (
        "Before the rise, with attention uniform over the two numbers, "
        f"{trained:.1%} are right of the sums whose other order it was trained on (b + a for a + b), {other:.2%} of "
        "the rest: memory, not addition."
    )
    said = reading(outcome.result.frame, outcome.config)
    caption = f"{said} Over {count} sums it was not trained on. {order} {INTERVALS}"
    alt = "share of right answers with and without uniform attention"
    return Figure(figure, caption=caption, alt=alt, width=BARS_WIDTH)


def claims_table(outcome: Outcome) -> Table:
    """Returns the paper's claims with ours beside them, each with its rule and verdict."""
    import pandas

    rows = judged_claims(outcome.result.frame, outcome.config)
    count = outcome.row("post", "mse_masked")["n"]
    columns = [
        Column("claim", "claim", sentences=True),
        Column("edit", "edit"),
        Column("published", "published", sentences=True),
        Column("here: as trained -> edited [95% CI of the edited]", "ours", sentences=True),
        Column("rule", "rule", sentences=True),
        Column("what the rule is about [95% CI]", "judged", sentences=True),
        Column("on this model", "verdict"),
    ]
    caption = (
        f"A claim holds on this model where the whole interval of what its rule is about, over the same {count} "
        "matrices with and without the edit, keeps the rule; effect is edited minus as trained. (A claim about "
        "training needs at least three runs: interp-run reproduce matrix-completion.) mse_masked is the error at the "
        "blanks, L_mask in the paper; mse_observed that at the given entries, L_obs. The paper's text says uniform "
        "attention; its code puts the mean map over the batch in its place (mean_pattern)."
    )
    return Table(pandas.DataFrame(rows), caption=caption, columns=columns, name="demo-claims")


def numbers_table(outcome: Outcome) -> Table:
    frame: pandas.DataFrame = outcome.result.frame
    columns = [Column("checkpoint", "ref"), Column("step", "step"), *shown_columns(frame)]
    name = f"demo-{outcome.title.lower().replace(' ', '-')}"
    return Table(frame, caption=" ".join(outcome.result.notes), columns=columns, name=name)
