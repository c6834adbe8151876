"""A paper of our own on tiny runs: every verdict against the table of the experiment called directly."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas
import pytest

import tasks
from interp_tasks import experiments, train
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.published import Claim, Paper
from interp_tasks.published.paper_schema import format_setting
from interp_tasks.reproduction import compare_records_with_runs, measure, reproduce, train_missing
from interp_tasks.reproduction.runs_and_records import read_records_file, stored_runs, write_records

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


def paper_of(content):
    return Paper(**content["paper"], **{key: value for key, value in content.items() if key != "paper"})


def content(*claims, **changes):
    """Two runs of one role, a study of each and one of both together."""
    run = {"role": "core", "preset": "cpu", "task": "matrix-completion", "settings": SETTINGS, "hours": 0.5}
    return {
        "paper": {"name": "small", "title": "Small", "citation": "Nobody 2020", "departures": ["Smaller."]},
        "row": [{"number": 1, "title": "First"}, {"number": 2, "title": "Second"}],
        "run": [{**run, "name": "a"}, {**run, "name": "b", "settings": SETTINGS | {"train.seed": 1}}],
        "study": [
            {"id": "s", "experiment": "ablation", "at": ["0", "4"], "settings": {"samples": 8}},
            {"id": "t", "experiment": "ablation", "at": ["4"], "together": True, "settings": {"samples": 8}},
        ],
        "claim": list(claims),
    } | changes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs, with the first of the two in it."""
    folder = tmp_path_factory.mktemp("runs")
    paper = paper_of(content())
    (first, _) = paper.run
    settings = {key: format_setting(value) for key, value in first.settings.items()}
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


def reproduced(paper, *, runs, rows=(), **options):
    """A paper's verdicts on the runs of a folder, measured and judged: all, and a series for each claim."""
    with TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        measure(paper, file=records, runs=runs, rows=rows, **options)
        found = reproduce(paper, records=records, runs=runs, rows=rows)
        return found, [row for _, row in found.frame.iterrows()]


@pytest.fixture(scope="module")
def table(runs):
    return experiments.ablation([f"{runs}/a@0", f"{runs}/a@4"], samples=8).frame


def row_of(table, ref="4", metric="mse_masked"):
    return table[table["ref"].str.endswith(f"@{ref}") & (table["metric"] == metric)].iloc[0]


def test_a_paper_on_one_run_of_two(runs):
    where = {"metric": "mse_masked"}
    scale = claim(id="scale", scale={"cpu": "too small"})
    together, of_b, of_a = (
        claim(id=name, row=2, study="t", where=where | of)
        for name, of in (("together", {"ref": "4"}), ("of b", {"run": "b"}), ("of a", {"run": "a"}))
    )
    paper = paper_of(content(*(each.model_dump() for each in (claim(), scale, together, of_b, of_a))))
    seen = []
    found, rows = reproduced(paper, runs=runs, progress=lambda *state: seen.append(state))
    # Each study on the run that is there, and on its untrained model.
    assert [state[:2] for state in seen] == [(done, 4) for done in range(1, 5)]
    verdicts = {(row["claim"], row["run"]): row for row in rows}
    alone = verdicts["value", "a"]
    assert (alone["verdict"], alone["n_runs"]) == ("undecided", 1)
    assert verdicts["scale", "a"][["verdict", "reason"]].tolist() == ["not testable", "too small"]
    # Together: what is there, and how many runs that is.
    assert verdicts["together", "core"][["verdict", "n_runs"]].tolist() == ["undecided", 1]
    # What is said of a run that is not there is not decided on those that are.
    missing = verdicts["of b", "core"]
    assert (missing["verdict"], missing["hours"]) == ("not run", 0.5)
    assert pandas.isna(missing["value"])
    assert verdicts["of a", "core"]["reason"].endswith("of three at least; this one lies within the rule")
    assert {each.name for each in found.missing} == {"b"}
    assert found.measured == ("a",)
    only, _ = reproduced(paper, runs=runs, rows=[2])
    assert only.frame["claim"].tolist() == ["together", "of b", "of a"]


@pytest.mark.parametrize("together", [False, True])
def test_a_step_that_two_marks_mean_counts_under_both(runs, together):
    """A run that stores few steps may have one alone before its drop."""
    where = {"metric": "mse_masked"}
    by_number = claim(id="number", where=where | {"ref": "4"})
    by_mark = claim(id="mark", where=where | {"ref": "last"}, per={"ref": "4", **where})
    before = claim(id="before", where=where | {"ref": "0"})
    given = content(*(one.model_dump() for one in (by_number, by_mark, before)))
    study = given["study"][0] | {"at": ["0", "4", "last"], "together": together}
    found, _ = reproduced(paper_of(given | {"study": [study, given["study"][1]]}), runs=runs)
    value = found.frame.set_index("claim")["value"]
    assert value["mark"] == 1
    assert value["number"] != value["before"]
    assert not found.errors


def test_runs_of_other_settings_are_other_conditions(runs):
    """Seeds of one setting are decided together; another setting, here the width, by itself."""
    given = content(claim().model_dump())
    wide = {**given["run"][1], "name": "wide", "settings": SETTINGS | {"model.d_model": 16}}
    longer = {**given["run"][1], "name": "longer", "settings": SETTINGS | {"train.steps": 9, "train.seed": 2}}
    paper = paper_of(given | {"run": [*given["run"], wide, longer]})
    found, _ = reproduced(paper, runs=runs)
    assert found.frame[["run", "verdict"]].values.tolist() == [["a", "undecided"], ["wide", "not run"]]
    assert [each.name for each in found.missing] == ["b", "longer", "wide"]


def test_the_untrained_model_is_that_before_the_first_step(runs, table):
    """Its number is that of step 0, whatever mark the claim is about."""
    paper = paper_of(content(claim(holds={"above": 0.0}).model_dump()))
    _, (row,) = reproduced(paper, runs=runs, rows=[1])
    assert row["untrained"] == pytest.approx(row_of(table, "0")["value"])
    assert row["reason"].startswith("an untrained model passes too; one training run")
    none = claim(holds={"above": 0.0}, uncontrolled="it is so by definition").model_dump()
    _, (row,) = reproduced(paper_of(content(none)), runs=runs, rows=[1])
    # Its number is shown, and nothing said against the claim.
    assert row["untrained"] == pytest.approx(row_of(table, "0")["value"])
    assert row["reason"].startswith("one training run")


def test_what_a_trained_run_gives_goes_into_the_control_too(runs, table):
    """Weights of the run's end in its untrained model: as in its own checkpoint of step 0."""
    given = content(
        claim(where={"ref": "0", "metric": "mse_masked", "variant": "qkv+mlp+unembed"}).model_dump()
    )
    given["study"][0] |= {
        "experiment": "transplant",
        "at": ["0"],
        "settings": {"source": "{trained}@4", "components": ["qkv+mlp+unembed"], "samples": 8},
    }
    _, (row,) = reproduced(paper_of(given), runs=runs, rows=[1])
    assert row["untrained"] == pytest.approx(row["value"])


@pytest.mark.parametrize(("control", "step"), [("shuffled", "4"), ("memorised", "0")])
def test_another_model_stands_for_the_run_that_is_claimed_about(runs, table, control, step):
    """The same run plays the shuffled one, an earlier checkpoint of it the one that has memorised."""
    where = {"ref": "4", "metric": "mse_masked", "run": "a"}
    given = content(claim(controls=[control], where=where).model_dump())
    given["run"].append(given["run"][0] | {"role": "mixed"})
    given["study"][0] |= {"shuffled": "mixed", "memorised": "0"}
    _, (row,) = reproduced(paper_of(given), runs=runs, rows=[1])
    assert row[control] == pytest.approx(row_of(table, step)["value"])
    assert pandas.isna(row["untrained"])


def of_small(monkeypatch, paper):
    """Lets the name of any paper stand for this one."""
    for function in (measure, reproduce):
        monkeypatch.setattr(sys.modules[function.__module__], "read_paper", lambda name: paper)


def test_what_is_written_and_shown(runs, tmp_path, monkeypatch, capsys):
    given = content(
        claim(
            says="It <b>stays</b>.", published="r/9 | 0.1", unit="of the norm", over="examples", headline=True
        ).model_dump(),
        claim(id="b", row=2, study="t", holds={"above": 1e9}).model_dump(),
    )
    paper = paper_of(given)
    found, _ = reproduced(paper, runs=runs)
    found.write(tmp_path / "out")
    rows = json.loads((tmp_path / "out/claims.json").read_text())
    # An untrained model has an error below a billion, too.
    assert [row["verdict"] for row in rows] == ["not testable", "undecided"]
    assert [row["what"] for row in rows] == ["of the norm", ""]
    assert rows[0]["runs"] == [{"run": "a", "value": rows[0]["value"]}]
    assert rows[0]["untrained"] > 0
    assert json.loads(pandas.read_csv(tmp_path / "out/claims.csv")["runs"][0]) == rows[0]["runs"]
    page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
    assert "It &lt;b&gt;stays" in page
    assert page.index("Headlines") < page.index("Claims")
    assert paper.run[1].command(str(runs)) in page.replace("&#x27;", "'")
    of_small(monkeypatch, paper)
    assert main(["reproduce", "small", "--runs", str(runs), "--out", str(tmp_path / "cli"), "--measure"]) == 0
    shown = capsys.readouterr().out
    assert "Not measured: 1 run(s), 0.5 h of training; --train makes them.\n0.5 h: interp-run train" in shown
    assert "1 held" not in shown  # no score


def test_a_record_is_measured_once_and_checked_on_request(runs, tmp_path):
    """Verdicts need the file alone: the run may be gone. A number that a claim reads and is not the run's is found."""
    paper = paper_of(content(claim().model_dump()))
    records, folder = tmp_path / "records.jsonl", tmp_path / "runs"
    shutil.copytree(runs / "a", folder / "a")
    assert len(measure(paper, file=records, runs=folder, rows=[1])) == 2
    written = records.read_text()
    assert measure(paper, file=records, runs=folder, rows=[1]) == []
    assert records.read_text() == written
    assert compare_records_with_runs(paper, file=records, runs=folder) == []
    before = reproduce(paper, records=records, rows=[1]).frame
    stored = read_records_file(records)
    key = ("s", "a", "")
    value = stored[key].columns.index("value")
    rows = [
        tuple(2 * cell if at == value else cell for at, cell in enumerate(row)) for row in stored[key].rows
    ]
    write_records(records, [*stored.values(), replace(stored[key], rows=tuple(rows))])
    found = compare_records_with_runs(paper, file=records, runs=folder)
    assert len(found) == 1 < len(rows)  # the other says that the run was measured, and is read by no claim
    assert all(line.startswith("s on a: a ") and ": value was " in line for line in found)
    records.write_text(written)
    # A log alone, without weights to measure, is not said to differ.
    shutil.rmtree(folder / "a/checkpoints")
    assert compare_records_with_runs(paper, file=records, runs=folder) == []
    shutil.rmtree(folder)
    pandas.testing.assert_frame_equal(reproduce(paper, records=records, rows=[1]).frame, before)
    # Of a study that measures otherwise, and of a run with other settings, it is no record.
    other = json.loads(json.dumps(content(claim().model_dump())))
    other["study"][0]["settings"]["samples"] = 4
    assert set(reproduce(paper_of(other), records=records).frame["verdict"]) == {"not run"}
    other = content(claim().model_dump())
    other["run"] = [{**each, "settings": each["settings"] | {"model.d_model": 16}} for each in other["run"]]
    assert set(reproduce(paper_of(other), records=records).frame["verdict"]) == {"not run"}
    records.write_text("nothing\n")
    with pytest.raises(UserError, match="line 1: no record of a measurement"):
        reproduce(paper, records=records)


def test_a_crash_is_told_after_everything_else_is_written(runs, tmp_path, monkeypatch, capsys):
    paper = paper_of(content(claim(where={"metric": "none"}).model_dump(), claim(id="u").model_dump()))
    of_small(monkeypatch, paper)
    assert main(["reproduce", "small", "--runs", str(runs), "--out", str(tmp_path), "--measure"]) == 2
    captured = capsys.readouterr()
    assert "claim value on a: no row has" in captured.err
    assert (tmp_path / "index.html").is_file()
    assert "undecided" in captured.out


@pytest.mark.parametrize(
    ("asked", "stored", "said"),
    [
        ({"model.d_model": 16}, {}, "its model.d_model is 8, not 16"),
        ({"train.seed": 3}, {}, "its train.seed is 0, not 3"),
        ({}, {"train": {"seed": 3}}, "its train.seed is 3, not 0"),
        # What the paper's file leaves at its default tells runs apart too.
        ({}, {"task": {"name": "miiii"}}, "its task.name is miiii, not matrix-completion"),
        ({}, {"model": {"own": {}}}, "its model.n_layers is None, not 1"),
        ({}, {"train": [1]}, "run.json is mangled: it has no config of task, model, train"),
        # What only says how a run was recorded does not, and a setting that is newer than it has its default.
        ({"train.log_every": 2, "train.checkpoint_every": 2}, {}, ""),
        ({}, {"task": {"p_mask": None}}, ""),
    ],
)
def test_a_folder_with_another_run_is_refused(runs, tmp_path, asked, stored, said):
    shutil.copytree(runs / "a", tmp_path / "a")
    whole = json.loads((tmp_path / "a/run.json").read_text())
    for section, values in stored.items():
        kept = {} if section == "model" else whole["config"][section]
        changed = {**kept, **values} if isinstance(values, dict) else values
        if isinstance(changed, dict):
            changed = {name: value for name, value in changed.items() if value is not None}
        whole["config"][section] = changed
    (tmp_path / "a/run.json").write_text(json.dumps(whole))
    given = content(claim().model_dump())
    given["run"][0]["settings"] = SETTINGS | asked
    if not said:
        assert stored_runs(paper_of(given), "cpu", tmp_path)[0].base == f"{tmp_path}/a"
        return
    with pytest.raises(UserError) as raised:
        stored_runs(paper_of(given), "cpu", tmp_path)
    assert said in str(raised.value)


def test_training_what_is_missing_gives_what_the_command_gives(runs, tmp_path):
    given = content(claim().model_dump())
    given["run"] = [{**given["run"][0], "seeds": "0:2"}]
    paper = paper_of(given)
    folders = train_missing(paper, runs=tmp_path)
    assert folders == [tmp_path / "a/seed-0", tmp_path / "a/seed-1"]
    # Seed 0 is the run that was trained for the other tests.
    weights = "checkpoints/00000004/model.safetensors"
    assert (folders[0] / weights).read_bytes() == (runs / "a" / weights).read_bytes()
    assert (folders[1] / weights).read_bytes() != (folders[0] / weights).read_bytes()
    assert train_missing(paper, runs=tmp_path) == []
    # Interrupted: nothing is decided on it, and it goes on where it stopped; the other seed counts.
    trained = (folders[1] / weights).read_bytes()
    shutil.rmtree((folders[1] / weights).parent)
    found, (row,) = reproduced(paper, runs=tmp_path, rows=[1])
    assert (row["verdict"], row["n_runs"]) == ("undecided", 1)
    (lacking,) = found.missing
    assert (lacking.name, lacking.seeds, lacking.hours) == ("a", "1", 0.25)
    assert train_missing(paper, runs=tmp_path) == folders[1:]
    assert (folders[1] / weights).read_bytes() == trained
    whole = claim(id="u", row=2, study="t", reduce="mean").model_dump()
    _, (row,) = reproduced(paper_of(given | {"claim": [whole]}), runs=tmp_path)
    assert (row["verdict"], row["n_runs"]) == ("undecided", 2)
    assert [each["run"] for each in row["runs"]] == ["a/seed-0", "a/seed-1"]
