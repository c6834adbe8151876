"""The main job on the shipped models: uniform attention before and after each learned abruptly.

What is said of the published claims follows from their rules, in ``interp_tasks/published/matrix_completion.toml``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import resolve
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.measurement.head_edits import HeadEdit
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, find_runs, read_one
from interp_tasks.measurement.runner import Measured, measure, run_sweep
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, Progress, subjects
from interp_tasks.pages import number, percent, with_interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from interp_tasks.published import Claim

    Array = NDArray[np.floating]

MATRIX_RUN = "zoo:matrix-completion-7x7"
MODULAR_RUN = "zoo:modular-addition-113"

#: The edits of each model, all of them in every head: (mode, keys). The paper on matrix completion says uniform
#: attention; its released code replaces a map by its mean over the batch.
MATRIX_EDITS: tuple[tuple[str, tuple[int, ...] | None], ...] = (("uniform", None), ("mean_pattern", None))
MODULAR_EDITS = (*MATRIX_EDITS, ("uniform", (0, 1)))
#: What the table calls the last of them.
OPERANDS = "uniform(keys=0,1)"

#: The published claims, by their names in the paper's file, and what they say of the error.
CLAIMS = {
    "uniform-before-hidden": "hardly changes",
    "uniform-before-observed": "stays small",
    "uniform-after-hidden": "goes back to the error of guessing 0",
    "uniform-after-observed": "stays small",
}
#: Shares of the accuracy above chance that count as kept, and as lost.
KEPT, LOST = 0.9, 0.5
#: What the table calls all heads.
ALL = "all"
#: Whether the rule of a claim holds, in words.
VERDICTS = {True: "holds", False: "does not hold", None: "undecided"}


@dataclass(frozen=True)
class Outcome:
    """A shipped run with its log, its task's settings, and what the edits do before and after its drop.

    Attributes:
        unedited: mark -> metric -> row of the unedited model on the same examples, with an interval of its own.
    """

    title: str
    log: Run
    config: dict[str, Any]
    result: Result
    unedited: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def edits(self) -> list[str]:
        return list(dict.fromkeys(self.result.frame["intervention"]))

    def row(self, mark: str, metric: str, intervention: str = "uniform") -> dict[str, Any]:
        """Returns the one row of a checkpoint (``pre`` or ``post``), metric and edit."""
        frame = self.result.frame
        of_edit = (frame["metric"] == metric) & (frame["intervention"] == intervention)
        row: dict[str, Any] = frame[frame["ref"].str.endswith(f"@{mark}") & of_edit].to_dict("records")[0]
        return row


@dataclass(frozen=True)
class Demo:
    """Both models: what uniform attention does to each, and what their pages' pictures show.

    Attributes:
        mirrored: the share of right answers of :func:`right_by_mirror` before the rise.
    """

    matrices: Outcome
    filled: Filled
    sums: Outcome
    answered: Answered
    ring: Ring
    mirrored: tuple[float, float]

    def results(self) -> list[Result]:
        return [self.matrices.result, self.sums.result]


def check_runs() -> None:
    """Refuse, before slow work, a demo whose checkpoints are not there."""
    for run in (MATRIX_RUN, MODULAR_RUN):
        for mark in ("pre", "post"):
            resolve(f"{run}@{mark}")


def demo(samples: int = 256, seed: int = 0, progress: Progress | None = None) -> Demo:
    """Ablate attention in shipped models before and after they learn abruptly: some twenty seconds."""
    total = sum(len(resolve(f"{run}@all")) for run in (MATRIX_RUN, MODULAR_RUN))
    reported: list[str] = []

    def report(name: str) -> None:
        if progress is not None:
            progress(len(reported), total, name)
        reported.append(name)

    filled = fill_in(MATRIX_RUN, samples, seed, report)
    answered, ring = answer(MODULAR_RUN, samples, seed, report)
    matrices = measured_outcome("Matrix completion", MATRIX_RUN, MATRIX_EDITS, samples, seed)
    sums = measured_outcome("Modular addition", MODULAR_RUN, MODULAR_EDITS, samples, seed)
    return Demo(matrices, filled, sums, answered, ring, right_by_mirror(f"{MODULAR_RUN}@pre"))


def measured_outcome(title: str, run: str, edits: Any, samples: int, seed: int) -> Outcome:
    """Returns what edits of all heads do before and after a run's drop, as ``interp-run ablation`` measures it."""
    readings = [HeadEdit.parse(mode, keys) for mode, keys in edits]
    unedited: dict[str, dict[str, dict[str, Any]]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        from circuits import heads
        from circuits import run as run_model
        from interp_tasks.measurement.paired import paired

        assert subject.task is not None
        assert subject.batch is not None
        metrics = subject.task.metrics(run_model(subject.model, subject.tokens), subject.batch)
        mark = str(subject.labels["ref"]).rpartition("@")[2]
        unedited[mark] = {row["metric"]: row for row in paired(metrics, None, subject.seed)}
        every = {ALL: heads("all", subject.model)}
        variants = {edit.name: edit.on(subject, every)[ALL] for edit in readings}
        measured = run_sweep(subject, variants, {name: name for name in variants})
        return replace(measured, frame=measured.frame.assign(variant=ALL))

    config = {"heads": [ALL], "edits": [edit.describe() for edit in readings]}
    options: Options = {"samples": samples, "seed": seed}
    result = measure("ablation", [f"{run}@pre", f"{run}@post"], options, measure_checkpoint, config=config)
    ((name, path),) = find_runs(run).items()
    task = read_meta(resolve(f"{run}@post")[0].path)["task"]["config"]
    return Outcome(title, read_one(name, path), task, result, unedited)


def guessing(config: dict[str, Any]) -> float:
    """Returns the variance of an entry, the error of guessing 0.

    Entries are sums of r products of two uniforms on [-scale, scale], whose variance is scale² / 3 each.
    """
    return float(config["rank"] * config["scale"] ** 4 / 9)


def judged_claims(outcome: Outcome) -> list[dict[str, str]]:
    """Returns the claims of Gopalani, Lubana, Hu 2024, sections 3.1.2 and 3.2.1, on this model, each by its rule."""
    from interp_tasks.published import read_paper

    claims = {claim.id: claim for claim in read_paper("matrix-completion").claim}
    return [
        judged(claims[claim], what, outcome, name) for name in outcome.edits for claim, what in CLAIMS.items()
    ]


def judged(claim: Claim, what: str, outcome: Outcome, name: str) -> dict[str, str]:
    """Returns one claim: our numbers, the published ones, and whether the whole interval keeps the rule."""
    mark, metric, guess = claim.where["ref"], claim.where["metric"], guessing(outcome.config)
    row = outcome.row(mark, metric, name)
    kind = "effect" if claim.column == "effect" else "value"
    share, low, high = (row[column] / guess for column in (claim.column, f"{kind}_ci_low", f"{kind}_ci_high"))
    return {
        "claim": f"{'before' if mark == 'pre' else 'after'} the drop {metric} {what}",
        "edit": name,
        "published": claim.published,
        "ours": f"{number(row['baseline'])} -> {ours(row, number)}",
        "rule": f"{claim.column} {claim.holds} of the variance {number(guess)}",
        "judged": f"{claim.column} / variance: {with_interval(number(share), low, high)}",
        "verdict": VERDICTS[claim.holds.contains_between(low, high)],
    }


def reading(outcome: Outcome) -> str:
    """Returns a sentence on the accuracy that uniform attention leaves; nothing is published on these edits."""
    chance = 1 / outcome.config["p"]
    plain = outcome.row("post", "accuracy")["baseline"]
    if plain < 0.5:
        return "It has not learned the task, so there is nothing for an ablation to take away."
    left = {name: outcome.row("post", "accuracy", name)["value"] for name in ("uniform", OPERANDS)}
    share = (left[OPERANDS] - chance) / (plain - chance)
    if share >= KEPT:
        meaning = "so this model does not need its heads to weigh the two numbers differently"
    elif share < LOST:
        meaning = (
            "so this model needs its heads to weigh the two numbers differently, head by head or sum by sum"
        )
    else:
        meaning = "so part of what it does rests on heads that weigh the two numbers differently"
    return (
        f"With uniform attention in every head, {left['uniform']:.1%} of the sums are right instead of {plain:.1%}; "
        f"with attention uniform over the two numbers alone, {left[OPERANDS]:.1%}, {meaning}."
    )


#: Matrices, and sums (the first of the sample), that the page shows.
SHOWN = 8


@dataclass(frozen=True)
class Filled:
    """Matrices and their completions.

    Attributes:
        steps: of the checkpoints.
        truth, hidden: the matrices and where they are blank, ``[matrix row column]``.
        trained, uniform: outputs ``[checkpoint matrix row column]``, as they are and with uniform
            attention in all heads.
    """

    steps: Sequence[int]
    truth: NDArray[np.floating]
    hidden: NDArray[np.bool_]
    trained: NDArray[np.floating]
    uniform: NDArray[np.floating]

    def error(self, outputs: NDArray[np.floating], checkpoint: int, matrix: int) -> float:
        """Returns the mean squared error at the blanks of one matrix, NaN where there is none."""
        blank = self.hidden[matrix]
        if not blank.any():
            return float("nan")
        return float(((outputs[checkpoint, matrix] - self.truth[matrix]) ** 2)[blank].mean())


def spread(errors: NDArray[np.floating]) -> list[int]:
    """Returns which matrices are shown: evenly spaced by rank of their errors, from the median on.

    After the largest of these errors comes the smallest; a matrix without an error, as it has no blanks, counts as
    one of the largest.
    """
    import numpy as np

    count = min(SHOWN, len(errors))
    ranked = np.argsort(errors, kind="stable")
    spaced = [int(ranked[part * len(errors) // count]) for part in range(count)]
    return [*spaced[count // 2 :], *spaced[: count // 2]]


def fill_in(run: str, samples: int, seed: int, tell: Callable[[str], None]) -> Filled:
    """Returns completions of some matrices of a sample, chosen by the last checkpoint's errors, by every checkpoint."""
    import numpy as np

    from circuits import ablate
    from circuits import run as run_model

    examples = Examples(samples=samples, seed=seed)
    (last,) = subjects(f"{run}@last", examples)
    assert last.task is not None
    assert last.batch is not None
    sums, counts = last.task.metrics(run_model(last.model, last.tokens), last.batch)["mse_masked"]
    shown = spread((sums / counts).double().numpy())
    trained, uniform, steps = [], [], []
    subject: LoadedCheckpoint | None = None
    for subject in subjects(f"{run}@all", examples):
        tell(subject.name)
        tokens = subject.tokens[shown]
        steps.append(subject.checkpoint.step)
        trained.append(run_model(subject.model, tokens)[..., 0].double().numpy())
        uniform.append(run_model(subject.model, tokens, ablate.uniform("all"))[..., 0].double().numpy())
    assert subject is not None
    assert subject.batch is not None
    shape = tuple(len(axis.values) for axis in subject.task.grid_axes()) if subject.task is not None else ()
    batch = subject.batch[shown]
    truth, hidden = batch.targets.double().numpy(), batch.extras["hidden"].numpy()
    return Filled(
        steps,
        truth.reshape(-1, *shape),
        hidden.reshape(-1, *shape),
        np.stack(trained).reshape(len(steps), -1, *shape),
        np.stack(uniform).reshape(len(steps), -1, *shape),
    )


@dataclass(frozen=True)
class Answered:
    """Sums and their answers.

    Attributes:
        steps: of the checkpoints.
        operands: ``[sum 2]``.
        right: the answers, ``[sum]``.
        answers: of each checkpoint, as it is and with uniform attention in all heads: ``[checkpoint 2 sum]``.
        looks: attention from the last position ``[checkpoint 2 sum head key]``.
        modulus: what the sums are taken by.
    """

    steps: Sequence[int]
    operands: NDArray[np.integer]
    right: NDArray[np.integer]
    answers: NDArray[np.integer]
    looks: Array
    modulus: int


@dataclass(frozen=True)
class Ring:
    """Embeddings of digits in the plane of one frequency, that which has most of their variance in the end.

    Attributes:
        points: ``[checkpoint digit 2]``: centred embeddings on the two directions in which the last checkpoint's go as
            the cosine and the sine of the frequency.
        shares: of the variance of the embeddings, how much is of this frequency, ``[checkpoint]``.
        phases: of each digit on the ring, 0 to 1.
    """

    frequency: int
    points: Array
    shares: Array
    phases: Sequence[float]


def answer(run: str, samples: int, seed: int, tell: Callable[[str], None]) -> tuple[Answered, Ring]:
    """Returns the answers of every checkpoint of a run to the first sums of a sample, and the ring of its digits."""
    import numpy as np

    from circuits import ablate
    from circuits import run as run_model
    from interp_tasks.measurement.embeddings import Tables, tables_of

    answers, looks, steps, tables = [], [], [], []
    subject: LoadedCheckpoint | None = None
    for subject in subjects(f"{run}@all", Examples(samples=samples, seed=seed)):
        tell(subject.name)
        task = subject.task
        assert task is not None
        steps.append(subject.checkpoint.step)
        tables.append(tables_of(task, Tables.of(subject.model))[0].rows)
        passes = [
            run_model(subject.model, subject.tokens[:SHOWN], *edits, cache=["pattern.0"])
            for edits in ((), (ablate.uniform("all"),))
        ]
        digits = len(tables[-1])
        answers.append([output[:, -1, :digits].argmax(-1).numpy() for output, _ in passes])
        looks.append([kept["pattern.0"][:, :, -1].double().numpy() for _, kept in passes])
    assert subject is not None
    assert subject.batch is not None
    answered = Answered(
        steps,
        subject.batch.extras["operands"][:SHOWN].numpy(),
        subject.batch.targets[:SHOWN].numpy(),
        np.array(answers),
        np.array(looks),
        len(tables[-1]),
    )
    return answered, ring_of(tables)


def right_by_mirror(ref: str) -> tuple[float, float]:
    """Returns how many untrained sums are right with attention uniform over both numbers, by whether b + a was trained.

    Equal weights do away with the order of the numbers, so that a model answers a + b as it does b + a.
    """
    from circuits import ablate
    from circuits import run as run_model

    (subject,) = subjects(ref, Examples())
    task = subject.task
    assert task is not None
    batch = task.sample(None, split="test")
    trained = {(a, b) for a, b in task.sample(None, split="train").extras["operands"].tolist()}
    output = run_model(subject.model, batch.tokens, ablate.uniform("all", keys=(0, 1)))
    right = output[:, -1].argmax(-1) == batch.targets
    mirrored = right.new_tensor([(b, a) in trained for a, b in batch.extras["operands"].tolist()])
    return float(right[mirrored].double().mean()), float(right[~mirrored].double().mean())


def ring_of(tables: Sequence[Array]) -> Ring:
    """Returns the ring of the embeddings of digits ``[digit d]`` of several checkpoints."""
    import numpy as np

    from circuits.fourier import basis, frequencies, spectrum

    last = np.asarray(tables[-1])
    digits = len(last)
    power = [spectrum(table).total().power.numpy() for table in tables]
    frequency = int(np.argmax(power[-1][1:])) + 1
    waves = basis(digits).numpy()[frequencies(digits).numpy() == frequency]
    directions, _ = np.linalg.qr((waves @ last).T)
    # A direction has no sign of its own: digit 0 stands at the right, and the digits go round to the left.
    directions = directions * np.sign(np.diagonal(waves @ last @ directions))
    points = np.stack([(table - table.mean(0)) @ directions for table in map(np.asarray, tables)])
    shares = np.array([each[frequency] / each[1:].sum() for each in power])
    return Ring(frequency, points, shares, [frequency * digit % digits / digits for digit in range(digits)])


#: Characters of a curve, lowest first, and how many of them it takes.
BLOCKS, CURVE = "▁▂▃▄▅▆▇█", 24


def summary(found: Demo) -> list[str]:
    """Returns the lines."""
    return [*matrix_lines(found.matrices), *sum_lines(found.sums)]


def matrix_lines(outcome: Outcome) -> list[str]:
    """Returns the lines about matrix completion: the error over training, as trained, edited, and published."""
    from interp_tasks.published import read_paper

    published = {claim.id: claim.published for claim in read_paper("matrix-completion").claim}
    texts = [
        published[f"uniform-{when}-hidden"].removeprefix("L_mask ").partition(",")[0]
        for when in ("before", "after")
    ]
    count = outcome.row("post", "mse_masked")["n"]
    return [
        f"Matrix completion (Gopalani et al. 2024): error at the blanks of {count} matrices",
        history(outcome, "mse_masked", f"{number(guessing(outcome.config))} is guessing 0"),
        line("", "as trained", "uniform attention", "published"),
        *(
            moment(outcome, mark, "mse_masked", number, [text])
            for mark, text in zip(("pre", "post"), texts, strict=True)
        ),
    ]


def sum_lines(outcome: Outcome) -> list[str]:
    count, modulus = outcome.row("post", "accuracy")["n"], outcome.config["p"]
    return [
        f"Modular addition (Nanda et al. 2023): right answers to {count} sums mod {modulus}",
        history(outcome, "accuracy", f"chance is {1 / modulus:.1%}"),
        line("", "as trained", "uniform attention", "over the numbers only"),
        *(
            moment(
                outcome, mark, "accuracy", percent, [ours(outcome.row(mark, "accuracy", OPERANDS), percent)]
            )
            for mark in ("pre", "post")
        ),
    ]


def moment(outcome: Outcome, mark: str, metric: str, shown: Any, more: Sequence[str]) -> str:
    row = outcome.row(mark, metric)
    when = f"{'before' if mark == 'pre' else 'after'}, step {row['step']:,}"
    return line(when, shown(row["baseline"]), ours(row, shown), *more)


def line(when: str, *cells: str) -> str:
    trained, edited, more = cells
    return f"  {when:<19}{trained:<12}{edited:<25}{more}".rstrip()


def ours(row: dict[str, Any], shown: Any) -> str:
    ends = (percent,) if shown is percent else ()
    return with_interval(shown(row["value"]), row["value_ci_low"], row["value_ci_high"], *ends)


def history(outcome: Outcome, metric: str, says: str) -> str:
    """Returns a metric over training as a row of blocks, and where its drop begins."""
    curve = outcome.log.curve(metric)
    largest = max(curve.values)
    last = curve.steps[-1]
    # At each place the last value logged until there.
    logged = list(zip(curve.steps, curve.values, strict=True))
    ends = [last * (place + 1) / CURVE for place in range(CURVE)]
    heights = [[value for step, value in logged if step <= end][-1] for end in ends]
    blocks = "".join(BLOCKS[round(height / largest * (len(BLOCKS) - 1))] for height in heights)
    moves = "" if curve.drop is None else f", turns at {curve.drop.onset:,}"
    return f"  {says:<20} {blocks} {last:,} steps{moves}"
