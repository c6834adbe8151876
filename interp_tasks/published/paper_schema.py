"""A paper as a TOML file: its rows, the runs by role, and the studies with the claims that they decide.

What stands in a study holds for its claims, unless they say otherwise: ``row``, ``source``, ``where``, ``scale``, ....
A claim's ``rule`` is about the rows that ``where`` picks; its ``per`` picks the divisor, and says only what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from interp_tasks.errors import UserError
from interp_tasks.file_io import tomllib
from interp_tasks.grid_spec import RunToShip, StrictSection, parse_seed_numbers, runs_shipped_by_recipe

Preset = Literal["cpu", "reference", "paper"]
PRESETS: tuple[str, ...] = get_args(Preset)
#: A model that should not pass what is said of a trained one.
Control = Literal["untrained", "memorised", "shuffled"]
#: What a row of a table is picked by: a column and its value, or several values.
Filter = dict[str, Any]


class PaperExperiment(StrictSection):
    """An experiment of the paper.

    Attributes:
        where: its section, table or figure.
        note: why nothing of it can be decided, where no claim is made of it.
    """

    number: int = Field(ge=1)
    title: str
    where: str = ""
    note: str = ""


class TrainingRun(StrictSection):
    """A run that studies read.

    Attributes:
        name: ``zoo:NAME`` where it is shipped, else a folder of that name.
        role: what studies call it; several runs may play one role. Those with the same settings but for the seed (and,
            at a constant rate, the length) are one condition: a claim is decided on all of them together.
        preset: the scale of ``reproduce`` at which it is used.
        task, train_preset, settings: as ``interp-run train TASK --preset ... --set ...`` takes them.
        seeds: ``"0:8"`` or ``"0,2"``, a run each, in ``NAME/seed-0``, ...
        recipe: the one that trains and ships it under its name, which then says task, preset and settings.
        hours: estimated training time, on two cores or (preset paper) on one large GPU.
        published: whether it is the paper's own configuration. Headlines are decided and corrected on that alone where
            it is there; runs of other recipes are conditions beside it.
    """

    name: str
    role: str
    preset: Preset
    task: str
    train_preset: str = "cpu"
    settings: dict[str, Any] = Field(default_factory=dict)
    seeds: str | None = None
    recipe: str = ""
    hours: float = Field(gt=0)
    published: bool = False

    def command(self, folder: str) -> str:
        """Returns the command that trains it."""
        given = "".join(f" --set {key}={format_setting(value)}" for key, value in self.settings.items())
        seeds = f" --seeds {self.seeds}" if self.seeds else ""
        return f"interp-run train {self.task} --preset {self.train_preset}{given}{seeds} --out {folder}/{self.name}"


def format_setting(value: Any) -> str:
    """Returns a setting as one types it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(format_setting, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()  # none, true, false
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


class Study(StrictSection):
    """One call of an experiment per run, or one for all runs of a role.

    Attributes:
        experiment: a function of ``interp_tasks.experiments``.
        role: the runs it is called on.
        at: marks or steps; REFs are ``RUN@mark``. Empty: the run itself.
        together: all runs of the role in one call; otherwise a call for each run, of several seeds for each seed.
        settings: keyword arguments; ``{trained}`` in a text stands for the run, on a control too.
        memorised: the mark or step at which a run has memorised its training inputs and generalises nothing yet.
        shuffled: the role of the runs that are trained on shuffled labels.
    """

    id: str
    experiment: str
    role: str = "core"
    at: tuple[str, ...] = ()
    together: bool = False
    settings: dict[str, Any] = Field(default_factory=dict)
    memorised: str | None = None
    shuffled: str | None = None


class Bounds(StrictSection):
    """The rule: the number lies strictly above the one and strictly below the other."""

    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> Bounds:
        if self.above is None and self.below is None:
            raise ValueError("a rule needs above, below, or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(f"nothing lies above {self.above:g} and below {self.below:g}")
        return self

    def contains(self, value: float) -> bool:
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)

    def __str__(self) -> str:
        ends = {"above": self.above, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in ends.items() if bound is not None)


class Claim(StrictSection):
    """A published statement, the number of ours that it is about, and the rule that decides it.

    Attributes:
        row: of the paper.
        source: section, table or figure.
        says: the statement, in our words.
        published: the published numbers, for display.
        number: that of them which stands beside ours where there is room for one, in the unit of the rule (a share,
            where ``per`` says so).
        where: picks rows of the study's table; ``ref`` is compared with what stands after the ``@``, ``run`` with the
            end of the run's name (a list: of one of several, whose names differ by scale); ``draw`` is empty unless
            asked for.
        reduce: ``one``: a single row must be left; or what to make of several. ``max / min``: of two rows at least; a
            run with fewer has no such number.
        column: which number of the row.
        per: divide by the row's ``baseline``, by the ``variance`` of an entry of the task, or by another row: by the
            same column of it, or by that which the filter's ``column`` names.
        holds: the rule, written before the first run on a trained model.
        over: what the interval is over: ``runs``, where the claim is about what training makes (three at least), or
            ``examples``, where it is about a method or a definition that no run of training changes; ``share of runs``
            where each run's number is 1 or 0: the share of runs that have it, with an exact binomial interval.
        log: whether the interval over runs is of the logarithm, and the number the geometric mean: for rules about
            orders of magnitude.
        unit: what our number is, in the words that stand after it: ``of the norm`` for 0.1275 of the norm. By default
            what ``per`` says.
        headline: whether it is one of those that the paper stands on; their p-values are corrected together.
        controls: what it is judged on too: ``untrained``, the run's model before its first step (every mark of ``at``
            stands for it), ``memorised``, an earlier checkpoint of the run, and ``shuffled``, a run trained on shuffled
            labels. By default ``untrained`` where ``at`` names checkpoints one by one (a log, or all of training, has
            no untrained model), and ``shuffled`` where the study names a role for it.
        uncontrolled: why a control that passes too says nothing against it: its number is shown, and no verdict made of
            it.
        absent: why a table may have no row of it; then it is not run, which else is an error.
        scale: preset -> why the claim cannot be tested there.
        departures: what of our setting differs from theirs and matters here.
    """

    id: str
    row: int
    study: str
    source: str
    says: str
    published: str = ""
    number: float | None = None
    where: Filter
    reduce: Literal["one", "mean", "min", "max", "max / min"] = "one"
    column: Literal["value", "effect", "baseline"] = "value"
    per: Literal["baseline", "variance"] | Filter | None = None
    holds: Bounds
    over: Literal["runs", "examples", "share of runs"] = "runs"
    log: bool = False
    unit: str = ""
    headline: bool = False
    controls: tuple[Control, ...] | None = None
    uncontrolled: str = ""
    absent: str = ""
    scale: dict[Preset, str] = Field(default_factory=dict)
    departures: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        if self.uncontrolled and self.controls:
            raise ValueError("either controls, or uncontrolled with the reason why there are none")
        if self.over == "examples" and (self.reduce != "one" or self.per is not None):
            raise ValueError("over examples is a claim about one row, undivided")
        if self.log and any(end is not None and end <= 0 for end in (self.holds.above, self.holds.below)):
            raise ValueError("a bound that is not above 0 has no logarithm")
        return self

    def control_names(self, study: Study) -> tuple[Control, ...]:
        """Returns the controls whose number stands beside that of the trained models."""
        if self.controls is not None:
            return self.controls
        untrained: tuple[Control, ...] = ("untrained",) if study.at and "all" not in study.at else ()
        return (*untrained, "shuffled") if study.shuffled is not None else untrained

    @property
    def what(self) -> str:
        """Returns the unit of our number, or the quantity it is a share of, to stand after it."""
        if self.over == "share of runs":
            return "of the runs"
        if self.unit or self.per is None:
            return self.unit
        if isinstance(self.per, dict):
            return "of the other"
        return {"baseline": "of the unedited", "variance": "of the variance"}[self.per]

    def divisor(self) -> tuple[str, Filter]:
        """Returns, for a rule about a share of another row, the column of that row and what picks it."""
        assert isinstance(self.per, dict)
        return self.per.get("column", self.column), {k: v for k, v in self.per.items() if k != "column"}

    @property
    def rule(self) -> str:
        """Returns the rule, with the number that it is about, in words."""
        about = self.column if self.reduce == "one" else f"{self.reduce} of {self.column}"
        if isinstance(self.per, dict):
            # Of the other row what is not the same.
            column, other = self.divisor()
            differs = {key: value for key, value in other.items() if self.where.get(key) != value}
            over = "that" if column == self.column else column
            ratio = f"{about} of {filter_text(self.where)} / {over} of {filter_text(differs or other)}"
            return f"{ratio} is {self.holds}"
        if self.per is not None:
            about += {"baseline": " / baseline", "variance": " / variance of an entry"}[self.per]
        return f"{about} of {filter_text(self.where)} is {self.holds}"


def filter_text(where: Filter) -> str:
    """Returns a filter in words."""
    parts = []
    for key, value in where.items():
        text = " or ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        parts.append(f"@{text}" if key == "ref" else text if key == "metric" else f"{key} {text}")
    return ", ".join(parts)


class Paper(StrictSection):
    """A paper.

    Attributes:
        name: as ``interp-run reproduce NAME``.
        departures: how all our models differ from theirs.
    """

    name: str
    title: str
    citation: str
    departures: tuple[str, ...] = ()
    row: tuple[PaperExperiment, ...]
    study: tuple[Study, ...] = ()
    claim: tuple[Claim, ...] = ()
    run: tuple[TrainingRun, ...] = ()

    def studies(self, rows: Sequence[int] = ()) -> list[Study]:
        """Returns the studies with a claim of these experiments; of any, where none is named."""
        asked = {claim.study for claim in self.claim if not rows or claim.row in rows}
        return [study for study in self.study if study.id in asked]


def paper_names() -> list[str]:
    """Returns the papers there are, by name."""
    folder = resources.files("interp_tasks.published")
    return sorted(
        entry.name.removesuffix(".toml").replace("_", "-")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def read_paper(name: str) -> Paper:
    """Returns a paper by name."""
    if name not in paper_names():
        raise UserError(f"no paper {name!r}: choose {', '.join(paper_names())}")
    file = resources.files("interp_tasks.published").joinpath(f"{name.replace('-', '_')}.toml")
    return parse_paper(tomllib.loads(file.read_text(encoding="utf-8")), file.name)


def parse_paper(content: Mapping[str, Any], source: str) -> Paper:
    """Returns a paper from the content of its file."""
    try:
        studies, claims = studies_and_claims(content.get("study", {}))
        rows = [{"number": number, **row} for number, row in content.get("row", {}).items()]
        roles = content.get("runs", {})
        runs = [merge_recipe({"role": role, **run}) for role, several in roles.items() for run in several]
        return Paper(**content.get("paper", {}), row=rows, study=studies, claim=claims, run=runs)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{source}: {location + ': ' if location else ''}{message}") from None
    except (UserError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{source}: {error}") from None


#: What a study may say for all of its claims.
SHARED = frozenset(Claim.model_fields) - frozenset(Study.model_fields)


def studies_and_claims(
    content: Mapping[str, Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the fields of studies and of claims, by the file's tables of studies."""
    studies, claims = [], []
    for name, table in content.items():
        shared = {key: value for key, value in table.items() if key in SHARED}
        own = {key: value for key, value in table.items() if key not in SHARED and key != "claim"}
        of_study = [
            merge_study_into_claim({"id": key, "study": name, **shared, **claim}, shared.get("where", {}))
            for key, claim in table.get("claim", {}).items()
        ]
        studies.append({"id": name, **own})
        claims += of_study
    return studies, claims


def merge_study_into_claim(given: Mapping[str, Any], where: Filter) -> dict[str, Any]:
    """Returns the fields of a claim, with its study's filter, its rule taken apart, and the whole of its divisor."""
    fields = {key: value for key, value in given.items() if key != "rule"}
    own = given.get("where", {})
    fields["where"] = {**own, **{key: value for key, value in where.items() if key not in own}}
    rule = dict(given.get("rule", {}))
    fields["holds"] = {key: rule.pop(key) for key in ("above", "below") if key in rule}
    if isinstance(rule.get("per"), Mapping):
        rule["per"] = {**fields["where"], **rule["per"]}
    return fields | rule


def merge_recipe(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run with task, preset and settings from its recipe, where it names one."""
    recipe, name, seeds = entry.get("recipe"), entry.get("name"), entry.get("seeds")
    if not recipe:
        return dict(entry)
    shipped = shipped_runs_by_name(recipe)
    names = [str(name)] if seeds is None else [f"{name}/seed-{seed}" for seed in parse_seed_numbers(seeds)]
    for each in names:
        if each not in shipped:
            raise UserError(f"run {name}: its recipe, {recipe}, ships no {each}")
    first = shipped[names[0]]
    # A seed of 0 is the default, those of several runs are said by their names.
    own_seed = {"train.seed": first.seed} if seeds is None and first.seed else {}
    settings = {**first.settings, **own_seed}
    return {**entry, "task": first.block.task, "train_preset": first.block.preset, "settings": settings}


@cache
def shipped_runs_by_name(recipe: str) -> dict[str, RunToShip]:
    return {run.name: run for run in runs_shipped_by_recipe(recipe)}
