"""Papers as files: what they must hold, and what is refused in them."""

import re

import pytest

from docs.scripts.pack import shipped_runs
from interp_tasks import experiments
from interp_tasks.errors import UserError
from interp_tasks.grid_spec import recipe_names
from interp_tasks.published import paper_names, read_paper
from interp_tasks.published.paper_schema import format_setting, parse_paper
from interp_tasks.setting_and_seed_parsing import parse_seeds
from interp_tasks.training.config import resolve_config

#: Experiments of the two papers on matrix completion, as our fact sheet counts them.
MATRIX_ROWS = 31


def paper(*, claim=(), study=(), run=(), **changes):
    """A small paper's content, with entries replaced or added to."""
    whole = {
        "source": "section 1",
        "says": "It falls.",
        "where": {"metric": "accuracy"},
        "rule": {"below": 0.5},
    }
    studied = {"row": 1, "experiment": "ablation", "at": ["post"], "claim": {"c": whole | dict(claim)}}
    trained = {"name": "a", "preset": "cpu", "task": "modular-addition", "hours": 0.1}
    return {
        "paper": {"name": "small", "title": "Small", "citation": "Nobody 2020"},
        "row": {"1": {"title": "First"}},
        "runs": {"core": [trained | dict(run)]},
        "study": {"s": studied | dict(study)},
    } | changes


@pytest.mark.parametrize("name", paper_names())
def test_every_paper_reads_and_names_what_there_is(name):
    found = read_paper(name)
    for study in found.study:
        assert callable(getattr(experiments, study.experiment)), study.id
    studies = {study.id: study for study in found.study}
    assert {claim.study for claim in found.claim} == {*studies}
    roles = {role for study in found.study for role in (study.role, study.shuffled) if role is not None}
    assert {run.role for run in found.run} == roles
    assert len({claim.id for claim in found.claim}) == len(found.claim)
    assert len({(run.name, run.role, run.preset) for run in found.run}) == len(found.run)
    for claim in found.claim:
        of = studies[claim.study]
        assert claim.row in {row.number for row in found.row}, claim.id
        named = {"shuffled": of.shuffled, "memorised": of.memorised}
        assert all(named.get(control, "") is not None for control in claim.control_names(of)), claim.id
    described = {}
    for run in found.run:
        # Runs of one name lie in one folder, whatever scale or role they are for.
        what = (run.task, run.train_preset, run.settings, run.seeds)
        assert described.setdefault(run.name, what) == what, run.name
        settings = {key: format_setting(value) for key, value in run.settings.items()}
        resolve_config(run.task, run.train_preset, settings)
    for claim in found.claim:
        assert claim.says.endswith("."), claim.id
        assert claim.what, f"{claim.id}: a bare number"
        assert set(claim.where) <= set(experiments.COLUMNS), claim.id
        if isinstance(claim.per, dict):
            column, where = claim.divisor()
            assert {column, *where} <= set(experiments.COLUMNS), claim.id


def test_no_experiment_of_the_matrix_completion_papers_is_left_out():
    found = read_paper("matrix-completion")
    assert [row.number for row in found.row] == list(range(1, MATRIX_ROWS + 1))
    decided = {claim.row for claim in found.claim} | {row.number for row in found.row if row.note}
    assert decided == set(range(1, MATRIX_ROWS + 1))


#: What recipes ship, by name: the whole configuration as `grid` trains it.
SHIPPED = {
    name: (recipe, unit) for recipe in recipe_names() for name, (_, unit) in shipped_runs(recipe).items()
}


@pytest.mark.parametrize("name", paper_names())
def test_runs_that_a_recipe_ships_are_those_that_it_trains(name):
    """Or a run that the recipe made would be refused as another one."""
    made = 0
    for run in read_paper(name).run:
        seeds = None if run.seeds is None else parse_seeds(run.seeds)
        names = [run.name] if seeds is None else [f"{run.name}/seed-{seed}" for seed in seeds]
        recipes = {SHIPPED[each][0] if each in SHIPPED else "" for each in names}
        assert recipes == {run.recipe}, run.name
        for each in names if run.recipe else ():
            unit = SHIPPED[each][1].resolved
            settings = {key: format_setting(value) for key, value in run.settings.items()}
            if seeds is not None:
                settings["train.seed"] = each.rpartition("-")[2]
            found = resolve_config(run.task, run.train_preset, settings)
            train = found.train.model_copy(update={"threads": unit.train.threads})  # the grid's
            assert (found.task_name, found.preset, found.task, found.model, train) == (
                *(unit.task_name, unit.preset, unit.task, unit.model),
                unit.train,
            ), each
            made += 1
    assert made >= 10


SEEDS = {
    "name": "modular-arithmetic-sweeps/addition",
    "preset": "cpu",
    "recipe": "modular-addition",
    "seeds": "1:4",
    "hours": 1,
}


def test_a_run_has_its_recipes_settings():
    (run,) = parse_paper(paper(runs={"core": [SEEDS]}), "x").run
    assert (run.task, run.train_preset, run.settings) == ("modular-addition", "cpu", {"train.steps": 2500})


@pytest.mark.parametrize("name", paper_names())
def test_published_numbers_lie_where_their_rule_says(name):
    """A paper that did not keep a rule could not be said to claim it; and a share of the variance is one."""
    checked = 0
    numbers = 0
    for claim in read_paper(name).claim:
        numbers += claim.number is not None
        if claim.number is None:
            continue
        assert claim.holds.contains(claim.number), claim.id
        shares = re.findall(r"([\d.e-]+), (?:by )?([\d.]+) of the variance", claim.published)
        for absolute, share in shares:
            if claim.column == "value":
                assert float(share) == pytest.approx(float(absolute) / (2 / 9), rel=0.06), claim.id
                checked += 1
    assert checked >= 10 or name != "matrix-completion"
    assert numbers >= 8


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (paper(study={"memorized": "0"}), "study.0.memorized"),
        (paper(claim={"rule": {}}), "a rule needs above, below, or both"),
        (paper(claim={"rule": {"above": 1, "below": 0}}), "nothing lies above 1 and below 0"),
        (paper(claim={"rule": {"below": 0, "log": True}}), "a bound that is not above 0 has no logarithm"),
        (paper(claim={"verdict": "held"}), "claim.0.verdict"),
        (paper(study={"claim": {"c": 3}}), "small.toml: "),
        *(
            (paper(runs={"core": [SEEDS | changes]}), said)
            for changes, said in (
                ({"recipe": "modular-additions"}, "no recipe of that name: the closest are modular-addition"),
                (
                    {"recipe": "miiii"},
                    "its recipe, miiii, ships no modular-arithmetic-sweeps/addition/seed-1",
                ),
                ({"seeds": "1:5"}, "ships no modular-arithmetic-sweeps/addition/seed-4"),
                ({"seeds": None}, "ships no modular-arithmetic-sweeps/addition"),
            )
        ),
    ],
)
def test_a_paper_that_contradicts_itself_is_refused_in_one_line(content, said):
    with pytest.raises(UserError, match=r"small\.toml") as raised:
        parse_paper(content, "small.toml")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_command_of_a_run_gives_its_settings(tmp_path):
    settings = {"train.steps": 10, "train.betas": [0.9, 0.99], "model.normalization": None, "task.p": 7}
    (run,) = parse_paper(paper(run={"settings": settings, "seeds": "0:2"}), "x").run
    command = run.command("runs")
    assert command == (
        "interp-run train modular-addition --preset cpu --set train.steps=10 --set train.betas=0.9,0.99 "
        "--set model.normalization=none --set task.p=7 --seeds 0:2 --out runs/a"
    )
    given = dict(part.strip().split("=", 1) for part in command.partition(" --seeds")[0].split("--set ")[1:])
    assert resolve_config("modular-addition", "cpu", given).model["normalization"] is None


def test_a_rule_says_what_it_is_about():
    """A study's filter is its claims', and a divisor is like the row it divides but where it says otherwise."""

    def rule(where, shared=(), **rule):
        (claim,) = parse_paper(
            paper(claim={"where": where, "rule": rule}, study={"where": dict(shared)} if shared else {}), "x"
        ).claim
        return claim.rule

    where = {"ref": "pre", "metric": "mse_masked", "head": 1}
    assert rule(where, column="effect", per="baseline", above=-0.05, below=0.05) == (
        "effect / baseline of @pre, mse_masked, head 1 is above -0.05 and below 0.05"
    )
    assert rule({"run": "a"}, {"metric": "loss", "run": "c"}, per={"run": "b"}, below=1) == (
        "value of run a, loss / that of run b is below 1"
    )
