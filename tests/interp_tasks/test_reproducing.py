"""A paper of our own on tiny runs: every verdict against the table of the experiment called directly."""

import json
import os
import shutil

import pandas
import pytest

import tasks
from interp_tasks import experiments, reproducing, train
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.published import Claim
from interp_tasks.published.papers import parse_paper
from interp_tasks.reproducing import reproduce, train_missing
from interp_tasks.reproducing.judging import Unmeasured, judge, measured, picked
from interp_tasks.reproducing.locating import Located, as_text, locate_all
from interp_tasks.reproducing.reproduction import about
from interp_tasks.reproducing.studying import Job, jobs_of, perform_all

SETTINGS = {
    "train.steps": 4,
    "train.batch_size": 8,
    "train.eval_samples": 8,
    "task.n": 3,
    "model.d_model": 8,
    "model.n_heads": 2,
    "model.n_layers": 1,
}
VALUE = {"id": "value", "row": 1, "study": "s", "source": "1", "says": "It stays.", "where": {"ref": "4"}}


def claim(**changes):
    entry = VALUE | {"where": {"ref": "4", "metric": "mse_masked"}, "holds": {"below": 1e9}} | changes
    return Claim(**entry)


def content(*claims, **changes):
    """Two runs of one role, a study of each and one of both together."""
    run = {"role": "core", "preset": "cpu", "task": "matrix-completion", "settings": SETTINGS, "hours": 0.5}
    return {
        "paper": {"name": "small", "title": "Small", "citation": "Nobody 2020", "departures": ["Smaller."]},
        "row": [{"number": 1, "title": "First"}, {"number": 2, "title": "Second"}],
        "run": [{**run, "name": "a"}, {**run, "name": "b", "settings": SETTINGS | {"train.seed": 1}}],
        "study": [
            {"id": "s", "rows": [1], "experiment": "ablation", "at": ["0", "4"], "settings": {"samples": 8}},
            {
                "id": "t",
                "rows": [2],
                "experiment": "ablation",
                "at": ["4"],
                "together": True,
                "settings": {"samples": 8},
            },
        ],
        "claim": list(claims),
    } | changes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs, with the first of the two in it."""
    folder = tmp_path_factory.mktemp("runs")
    paper = parse_paper(content(), "small.toml")
    (first, _) = paper.run
    settings = {key: as_text(value) for key, value in first.settings.items()}
    from interp_tasks.training.config import resolve_config

    resolved = resolve_config(first.task, "cpu", settings)
    train(
        tasks.get(first.task, **resolved.task),
        out=folder / "a",
        preset="cpu",
        settings=resolved.model,
        config=resolved.train,
    )
    return folder


@pytest.fixture(scope="module")
def table(runs):
    return experiments.ablation([f"{runs}/a@0", f"{runs}/a@4"], samples=8).frame


def row_of(table, ref="4", metric="mse_masked"):
    return table[table["ref"].str.endswith(f"@{ref}") & (table["metric"] == metric)].iloc[0]


def test_a_number_is_the_tables_with_its_interval(table):
    row = row_of(table)
    assert measured(claim(), table) == (row["value"], row["ci_low"], row["ci_high"], 1)
    found = measured(claim(column="effect", per="baseline"), table)
    expected = (row["effect"], *sorted([row["effect_ci_low"], row["effect_ci_high"]]))
    assert found[:3] == pytest.approx([number / row["baseline"] for number in expected])
    assert measured(claim(column="baseline"), table)[:3] == (row["baseline"], None, None)
    other = row_of(table, "0")
    found = measured(claim(per={"ref": "0", "metric": "mse_masked"}), table)
    assert found[0] == pytest.approx(row["value"] / other["value"])
    named = claim(per={"ref": "0", "metric": "mse_masked", "column": "baseline"})
    assert measured(named, table)[0] == pytest.approx(row["value"] / other["baseline"])


def test_several_rows_are_reduced_and_counted(table):
    both = {"metric": "mse_masked"}
    values = [row_of(table, ref)["value"] for ref in ("0", "4")]
    assert measured(claim(where=both, reduce="mean"), table)[0] == pytest.approx(sum(values) / 2)
    assert measured(claim(where=both, reduce="max"), table)[:3] == (max(values), None, None)
    assert measured(claim(where=both, reduce="count"), table)[0] == 2
    assert measured(claim(where={"metric": ["none"]}, reduce="count"), table)[0] == 0
    per_baseline = measured(claim(where=both, reduce="min", column="effect", per="baseline"), table)[0]
    rows = [row_of(table, ref) for ref in ("0", "4")]
    assert per_baseline == pytest.approx(min(row["effect"] / row["baseline"] for row in rows))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"metric": "mse_masked"}, "2 rows have"),
        ({"metric": "accuracy"}, "no row has"),
        ({"colour": "red"}, "no column 'colour'"),
    ],
)
def test_a_number_that_is_not_one_is_an_error_and_no_verdict(table, where, said):
    with pytest.raises(Unmeasured, match=said):
        measured(claim(where=where), table)
    outcome = judge(claim(where=where), table, "a")
    assert (outcome.verdict, outcome.value) == ("error", None)


def test_what_no_model_was_trained_for_rests_on_no_run(table):
    assert measured(claim(), table)[3] == 1
    assert measured(claim(), table.assign(n_runs=0))[3] == 0
    assert measured(claim(), table.assign(n_runs=7))[3] == 7


def test_a_run_is_named_by_its_end_or_by_one_of_several(table):
    (run,) = table["run"].unique()
    for ends in (run[-1:], [run[-1:]], ["at no scale", run]):
        assert len(picked(table, {"run": ends})) == len(picked(table, {}))
    assert picked(table, {"run": ["at no scale"]}).empty


def test_draws_are_left_out_unless_asked_for(table):
    drawn = pandas.concat([table, table.assign(draw=0)], ignore_index=True).astype({"draw": "Int64"})
    assert measured(claim(), drawn) == measured(claim(), table)
    everything = claim(where={"metric": "mse_masked", "ref": "4", "draw": 0})
    assert measured(everything, drawn)[0] == measured(claim(), table)[0]


def test_verdicts_follow_the_number_and_say_where_the_interval_disagrees(table):
    value, low, high, _ = measured(claim(), table)
    assert low < value < high
    cases = {
        (("below", high * 2),): ("held", ""),
        (("above", high * 2),): ("failed", ""),
        (("below", (value + high) / 2),): ("held", "reaches across"),
        (("above", (value + high) / 2),): ("failed", "reaches across"),
        (("above", low / 2), ("below", high * 2)): ("held", ""),
    }
    for bounds, (verdict, said) in cases.items():
        outcome = judge(claim(holds=dict(bounds)), table, "a")
        assert (outcome.verdict, outcome.n_runs) == (verdict, 1)
        assert said in outcome.reason
        assert bool(outcome.reason) == bool(said)


def test_a_row_without_its_number_fails_and_shows_none(table):
    outcome = judge(claim(), table.assign(value=float("nan")), "a")
    assert (outcome.verdict, outcome.value) == ("failed", None)


def test_a_share_of_nothing_fails_and_shows_none(table):
    outcome = judge(claim(column="effect", per="baseline"), table.assign(baseline=0.0), "a")
    assert (outcome.verdict, outcome.value, outcome.low) == ("failed", None, None)
    assert "a share of 0" in outcome.reason


@pytest.mark.parametrize(
    ("seeds", "named"), [(None, "sweeps/b"), ("0:3", "sweeps/b/seed-*"), ("0:3", ["a", "b/seed-*"])]
)
def test_a_claim_is_about_a_missing_run_by_the_name_that_its_table_has(seeds, named):
    (_, run) = parse_paper(content(), "small.toml").run
    missing = Located(run.model_copy(update={"name": "sweeps/b", "seeds": seeds}), None)
    assert about(claim(where={"run": named}), [missing])
    assert not about(claim(where={"run": "c"}), [missing])


def test_a_paper_on_one_run_of_two(runs):
    scale = claim(id="scale", scale={"cpu": "too small"}).model_dump()
    together = claim(id="together", row=2, study="t").model_dump()
    of_b = claim(id="of b", row=2, study="t", where={"run": "b", "metric": "mse_masked"}).model_dump()
    crash = {"id": "x", "rows": [1], "experiment": "ablation", "at": ["4"], "settings": {"colour": "red"}}
    of_crash = claim(id="crash", study="x").model_dump()
    given = content(claim().model_dump(), scale, together, of_b, of_crash)
    paper = parse_paper(given | {"study": [*given["study"], crash]}, "small.toml")
    seen = []
    found = reproduce(paper, runs=runs, progress=lambda *state: seen.append(state))
    assert [state[:2] for state in seen] == [(1, 3), (2, 3), (3, 3)]
    verdicts = {(each.claim.id, each.run): each for each in found.outcomes}
    assert verdicts["value", "a"].verdict == "held"
    missing = verdicts["value", "b"]
    assert (missing.verdict, missing.value, missing.hours) == ("not run", None, 0.5)
    assert missing.command == paper.run[1].command(str(runs))
    assert {verdicts["scale", name].verdict for name in "ab"} == {"not testable at this scale"}
    assert verdicts["scale", "a"].reason == "too small"
    assert verdicts["crash", "a"].verdict == "error"
    assert "colour" in found.crashed[0]
    assert len(found.crashed) == 1
    # Together: what is there, and how many runs that is.
    assert (verdicts["together", "core"].verdict, verdicts["together", "core"].n_runs) == ("held", 1)
    assert verdicts["together", "core"].reason == "without runs that are not trained: b"
    # What is said of a run that is not there is not decided on those that are.
    assert (verdicts["of b", "core"].verdict, verdicts["of b", "core"].hours) == ("not run", 0.5)
    assert [each.run.name for each in found.missing] == ["b"]
    assert found.counts() == {"held": 2, "not run": 3, "not testable at this scale": 2, "error": 1}
    only = reproduce(paper, runs=runs, rows=[2])
    assert [each.claim.id for each in only.outcomes] == ["together", "of b"]


def test_fresh_processes_give_the_same(runs):
    paper = parse_paper(content(claim().model_dump(), claim(id="u", row=2, study="t").model_dump()), "x")
    alone, beside = (reproduce(paper, runs=runs, processes=processes) for processes in (1, 2))
    pandas.testing.assert_frame_equal(alone.frame(), beside.frame())


def test_what_is_written_and_shown(runs, tmp_path, monkeypatch, capsys):
    given = content(
        claim(says="It <b>stays</b>.", published="r/9 | 0.1").model_dump(),
        claim(id="u", row=2, study="t", holds={"above": 1e9}).model_dump(),
    )
    paper = parse_paper(given, "small.toml")
    found = reproduce(paper, runs=runs)
    found.write(tmp_path / "out")
    rows = json.loads((tmp_path / "out/claims.json").read_text())
    assert [row["verdict"] for row in rows] == ["held", "not run", "failed"]
    assert rows[1]["value"] is None
    assert pandas.read_csv(tmp_path / "out/claims.csv")["rule"].notna().all()
    assert (tmp_path / "out/studies/s/a/ablation.parquet").is_file()
    text = (tmp_path / "out/claims.md").read_text(encoding="utf-8")
    assert "| a | r/9 \\| 0.1 | " in text
    assert f"not run, 0.5 h: `{paper.run[1].command(str(runs))}`" in text
    assert text.count("**failed**") == text.count("**held**") == 1
    page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
    assert page.count('class="plot"') == 2
    assert "It &lt;b&gt;stays" in page
    assert paper.run[1].command(str(runs)) in page.replace("&#x27;", "'")
    monkeypatch.setattr(reproducing.reproduction, "read_paper", lambda name: paper)
    assert (
        main(["reproduce", "small", "--runs", str(runs), "--out", str(tmp_path / "cli"), "--jobs", "1"]) == 0
    )
    captured = capsys.readouterr()
    assert "2 claims, 3 verdicts: 1 held, 1 failed, 1 not run." in captured.out
    assert (
        "Not trained: 1 run(s), 0.5 h in all; --train trains them.\n0.5 h: interp-run train" in captured.out
    )


def test_what_there_is_to_know_of_a_verdict_stands_below_the_table(
    runs, table, tmp_path, monkeypatch, capsys
):
    row = row_of(table)
    close = claim(id="close", holds={"below": (row["value"] + row["ci_high"]) / 2})
    paper = parse_paper(content(claim().model_dump(), close.model_dump()), "small.toml")
    monkeypatch.setattr(reproducing.reproduction, "read_paper", lambda name: paper)
    assert main(["reproduce", "small", "--runs", str(runs), "--out", str(tmp_path), "--jobs", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "close (a) held: the interval reaches across the rule's bound. 2 claims, 4 verdicts" in shown
    assert shown.count("(a) held:") == 1


class Deadly(Job):
    """A job in which a process dies: it ends whoever unpickles it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_process_that_dies_costs_its_own_job_alone(runs):
    paper = parse_paper(content(claim().model_dump()), "small.toml")
    jobs = [job for job in jobs_of(paper, locate_all(paper, "cpu", runs)) if job.refs()]
    assert len(jobs) == 2
    done = list(perform_all([jobs[0], Deadly(jobs[0].study, jobs[0].on), jobs[1]], processes=2))
    deadly = [one for one in done if isinstance(one.job, Deadly)]
    assert [(one.crashed, "its process died twice" in one.reason) for one in deadly] == [(True, True)]
    assert sorted(one.job.study.id for one in done if one.result is not None) == ["s", "t"]


def test_a_crash_is_told_after_everything_else_is_written(runs, tmp_path, monkeypatch, capsys):
    paper = parse_paper(
        content(claim(where={"metric": "none"}).model_dump(), claim(id="u").model_dump()), "x"
    )
    monkeypatch.setattr(reproducing.reproduction, "read_paper", lambda name: paper)
    assert main(["reproduce", "small", "--runs", str(runs), "--out", str(tmp_path), "--jobs", "1"]) == 2
    captured = capsys.readouterr()
    assert "claim value on a: no row has" in captured.err
    assert (tmp_path / "index.html").is_file()
    assert "1 held" in captured.out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.d_model": 16}, "its model.d_model is 8, not 16"),
        ({"train.weight_decay": 0.5}, "its train.weight_decay is 0.0, not 0.5"),
        ({"train.seed": 3}, "its train.seed is 0, not 3"),
        ({"train.train_parts": ["attn"]}, "its train.train_parts is [], not ['attn']"),
    ],
)
def test_a_folder_with_another_run_is_refused(runs, changes, said):
    given = content(claim().model_dump())
    given["run"][0]["settings"] = SETTINGS | changes
    with pytest.raises(UserError, match="is not the run 'a' of the paper") as raised:
        reproduce(parse_paper(given, "x"), runs=runs)
    assert said in str(raised.value)


def altered(runs, place, alter):
    """A copy of the run with another ``run.json``, as the paper's run of that name."""
    shutil.copytree(runs / "a", place / "a")
    whole = json.loads((place / "a/run.json").read_text())
    alter(whole)
    (place / "a/run.json").write_text(json.dumps(whole))
    return parse_paper(content(claim().model_dump()), "x")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "task.name",
            "matrix-completion-sizes",
            "its task.name is matrix-completion-sizes, not matrix-completion",
        ),
        ("task.p_mask", 0.75, "its task.p_mask is 0.75, not "),
        ("model.act_fn", "relu", "its model.act_fn is relu, not gelu"),
        ("model", {"own": {}}, "its model.n_layers is None, not 1"),
    ],
)
def test_what_the_paper_leaves_at_its_default_tells_runs_apart(runs, tmp_path, key, value, said):
    def alter(whole):
        section, _, name = key.partition(".")
        whole["config"] |= {section: whole["config"][section] | {name: value} if name else value}

    paper = altered(runs, tmp_path, alter)
    with pytest.raises(UserError, match="is not the run 'a' of the paper") as raised:
        locate_all(paper, "cpu", tmp_path)
    assert said in str(raised.value)


def test_a_setting_that_is_newer_than_the_run_has_its_default(runs, tmp_path):
    paper = altered(runs, tmp_path, lambda whole: whole["config"]["task"].pop("p_mask"))
    assert locate_all(paper, "cpu", tmp_path)[0].base == f"{tmp_path}/a"


@pytest.mark.parametrize("config", [None, [], {}, {"task": {"name": "miiii"}, "model": {}, "train": [1]}])
def test_a_run_without_a_config_is_refused_in_one_line(runs, tmp_path, config):
    paper = altered(runs, tmp_path, lambda whole: whole.update(config=config))
    with pytest.raises(UserError, match=r"a/run\.json is mangled: it has no config of task, model, train"):
        locate_all(paper, "cpu", tmp_path)


def test_what_only_recorded_a_run_may_differ(runs):
    given = content(claim().model_dump())
    given["run"][0]["settings"] = SETTINGS | {"train.log_every": 2, "train.checkpoint_every": 2}
    assert reproduce(parse_paper(given, "x"), runs=runs).outcomes[0].verdict == "held"


def test_training_what_is_missing_gives_what_the_command_gives(runs, tmp_path):
    given = content(claim().model_dump())
    given["run"] = [{**given["run"][0], "seeds": "0:2"}]
    paper = parse_paper(given, "x")
    folders = train_missing(paper, runs=tmp_path)
    assert folders == [tmp_path / "a/seed-0", tmp_path / "a/seed-1"]
    # Seed 0 is the run that was trained for the other tests.
    weights = "checkpoints/00000004/model.safetensors"
    assert (folders[0] / weights).read_bytes() == (runs / "a" / weights).read_bytes()
    assert (folders[1] / weights).read_bytes() != (folders[0] / weights).read_bytes()
    assert train_missing(paper, runs=tmp_path) == []
    # Interrupted: nothing is decided on it, and it goes on where it stopped.
    trained = (folders[1] / weights).read_bytes()
    shutil.rmtree((folders[1] / weights).parent)
    assert {each.verdict for each in reproduce(paper, runs=tmp_path).outcomes} == {"not run"}
    assert train_missing(paper, runs=tmp_path) == folders
    assert (folders[1] / weights).read_bytes() == trained
    found = reproduce(
        parse_paper(given | {"claim": [claim(id="u", row=2, study="t", reduce="mean").model_dump()]}, "x"),
        runs=tmp_path,
    )
    (outcome,) = found.outcomes
    assert (outcome.verdict, outcome.n_runs) == ("held", 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["other"], "no paper 'other'"),
        (["matrix-completion", "--rows", "32"], "--rows 32: matrix-completion has rows 1 to 31"),
        (["matrix-completion", "--rows", "five"], "--rows 'five'"),
        (["matrix-completion", "--preset", "huge"], "--preset 'huge'"),
        (["matrix-completion", "--jobs", "0"], "--jobs 0"),
        (["matrix-completion", "--device", "tpu"], "--device 'tpu'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(arguments, said, capsys):
    assert main(["reproduce", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
