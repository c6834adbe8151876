"""The demo: on stand-ins for the shipped models, and what it says for outcomes that differ."""

import json
import re

import pandas
import pytest

import tasks
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.cli import main
from interp_tasks.experiments.demo import measure
from interp_tasks.experiments.demo.measure import conclude_matrix_completion, conclude_modular_addition


def make_run(folder, task, settings, before, after):
    """A run folder with a drop at step 20, checkpoints at 10 and 40."""
    for step in (10, 40):
        save_checkpoint(folder / f"checkpoints/{step:08d}", task.build_model(step, settings), task, step=step)
    metric = task.drop_metric
    drop = {"name": metric.name, "direction": metric.direction}
    (folder / "run.json").write_text(json.dumps({"format": 1, "config": {}, "drop_metric": drop}))
    lines = ({"step": s, "validation": {metric.name: before if s < 20 else after}} for s in range(41))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    matrix = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)
    addition = tasks.get("modular-addition", p=7)
    make_run(tmp_path / "matrix", matrix, matrix.Model(n_layers=1, n_heads=2, d_model=8), 1.0, 0.0)
    small = addition.Model(n_layers=1, n_heads=2, d_model=8, init="nanda", normalization=None)
    make_run(tmp_path / "addition", addition, small, 0.0, 1.0)
    monkeypatch.setattr(measure, "MATRIX_RUN", str(tmp_path / "matrix"))
    monkeypatch.setattr(measure, "MODULAR_RUN", str(tmp_path / "addition"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_demo_prints_both_tables_and_writes_the_page(stand_ins, capsys):
    assert main(["demo", "--samples", "12"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "wrote interp-demo.html\n"
    for word in ("mse_masked", "mse_observed", "mse_all", "accuracy", "mean_pattern", "uniform(keys=0,1)"):
        assert word in captured.out
    page = (stand_ins / "interp-demo.html").read_text(encoding="utf-8")
    assert page.count("<table") == page.count('class="plot"') == 2
    # What the terminal says, the page says.
    said = re.findall(r"^- (.*)", captured.out, re.MULTILINE)
    assert len(said) >= 5
    assert all(sentence.split(",")[0][:40] in page for sentence in said)


def test_demo_as_json(stand_ins, capsys):
    assert main(["demo", "--samples", "12", "--format", "json", "--out", "sub/page.html", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = json.loads(captured.out)
    assert len(rows) == 2 * 3 * 2 + 2 * 2 * 3
    assert {row["ref"].rpartition("@")[2] for row in rows} == {"pre", "post"}
    assert (stand_ins / "sub/page.html").is_file()


def test_demo_without_its_models_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr(measure, "MODULAR_RUN", "zoo:gone")
    monkeypatch.setattr(measure, "MATRIX_RUN", "zoo:gone")
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("interp-run: no zoo:gone")


SPREAD = 5e-5


def rows(*given):
    """Frame rows (mark, metric, intervention, baseline, value)."""
    return pandas.DataFrame(
        [
            {
                "ref": f"x@{mark}",
                "step": {"pre": 100, "post": 900}[mark],
                "metric": metric,
                "intervention": intervention,
                "baseline": baseline,
                "value": value,
                "effect": value - baseline,
                "ci_low": value - SPREAD,
                "ci_high": value + SPREAD,
                "effect_ci_low": value - baseline - SPREAD,
                "effect_ci_high": value - baseline + SPREAD,
            }
            for mark, metric, intervention, baseline, value in given
        ]
    )


def matrix_frame(before, after, observed, observed_before=0.001):
    return rows(
        ("pre", "mse_masked", "uniform", 0.1, before),
        ("pre", "mse_observed", "uniform", 0.001, observed_before),
        ("post", "mse_masked", "uniform", 0.01, after),
        ("post", "mse_observed", "uniform", 0.001, observed),
    )


@pytest.mark.parametrize(
    ("frame", "holds"),
    [
        (matrix_frame(0.101, 0.11, 0.002), [True, True, True, True]),
        (matrix_frame(0.2, 0.11, 0.002), [False, True, True, True]),
        (matrix_frame(0.05, 0.5, 0.002), [False, True, False, True]),
        (matrix_frame(0.1, 0.02, 0.1, 0.04), [True, False, False, False]),
        # Intervals across a bound: 1% of the variance 1/9 away from the unedited 0.1, 0.9 of it, 5% of it.
        (matrix_frame(0.1 + 0.01 / 9, 0.1, 0.05 / 9), [None, True, None, None]),
    ],
)
def test_verdicts_follow_the_rules_of_the_paper_by_the_whole_interval(frame, holds):
    sentences = conclude_matrix_completion(frame, {"rank": 1, "scale": 1.0})
    words = {True: "holds here", False: "does not hold here", None: "is undecided here"}
    assert len(sentences) == len(holds)
    for sentence, held in zip(sentences, holds, strict=True):
        assert [answer for answer, word in words.items() if f" {word} (" in sentence] == [held]
    assert "the variance 0.1111" in sentences[2]
    # The published numbers stand beside ours.
    assert all(
        published in sentence
        for published, sentence in zip(
            ("0.2236 -> 0.2236", "3.4e-4 -> 3.2e-4", "0.0128 -> 0.2183", "9.2e-5 -> 3.7e-3"),
            sentences,
            strict=True,
        )
    )


def addition_frame(uniform, operands, learned=1.0):
    given = []
    for intervention, value in (("uniform", uniform), ("mean_pattern", 0.5), ("uniform(keys=0,1)", operands)):
        for mark, baseline in (("pre", 0.1), ("post", learned)):
            given.append((mark, "accuracy", intervention, baseline, value if mark == "post" else 0.1))
            given.append((mark, "loss", intervention, 1.0, 2.0))
    return rows(*given)


def test_modular_addition_presumes_no_outcome():
    last = [
        conclude_modular_addition(addition_frame(uniform, operands), {"p": 10})[-1]
        for uniform, operands in ((0.1, 1.0), (1.0, 0.1), (0.5, 0.73))
    ]
    assert "100% is kept, so this model does not need its heads" in last[0]
    assert "its third as well, 0%" in last[0]
    assert "0% is kept, so this model needs its heads" in last[1]
    assert "70% is kept, so part of what it does" in last[2]
    unlearned = conclude_modular_addition(addition_frame(0.1, 0.1, learned=0.2), {"p": 10})
    assert unlearned[-1].startswith("It has not learned the task")
