"""The report on a run: what it measures, against the experiments and closed forms, and what its page holds."""

import base64
import itertools
import json
import re
import shutil
import zlib
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

import tasks
from circuits import patterns
from interp_tasks import experiments
from interp_tasks.checkpoints import load_checkpoint, save_checkpoint
from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.pages import Figure, Slider, Stepped, SteppedTable, Table, Text
from interp_tasks.pages.pack import deflated, pack
from interp_tasks.published import read_paper
from interp_tasks.report import check_report, read_source, report
from interp_tasks.report.attention import (
    MAX_NUMBERS,
    attention_section,
    places,
    position_labels,
    tiled,
)
from interp_tasks.report.head_effects import effect_maps, ticks
from interp_tasks.report.headlines import heads_sentence, published_section
from interp_tasks.report.published import published_beside
from interp_tasks.report.snapshots import Strongest, View, shown_metrics
from interp_tasks.report.source import nearest
from interp_tasks.report.spectra import fourier_norms
from interp_tasks.reproduction.verdicts import judge

SAMPLES = 12


def make_run(folder, task, settings, steps=(0, 10, 40), last=0.01, first=0.1):
    """A run of untrained checkpoints, and a log that drops at step 20 (or does not)."""
    for step in steps:
        model = task.build_model(step, settings)
        save_checkpoint(folder / f"checkpoints/{step:08d}", model, task, step=step)
    metric = task.drop_metric
    config = {
        "task": {"name": task.name, **task.model_dump(mode="json")},
        "model": settings.model_dump(mode="json"),
        "train": {"steps": 40, "seed": 0, "eval_samples": 8},
    }
    drop = {"name": metric.name, "direction": metric.direction}
    (folder / "run.json").write_text(json.dumps({"format": 1, "config": config, "drop_metric": drop}))
    logged = (first if step < 20 else last for step in range(41))
    metrics = ("mse_all", "mse_masked", "mse_observed") if "mse" in metric.name else (metric.name,)
    lines = ({"step": step, "validation": dict.fromkeys(metrics, value)} for step, value in enumerate(logged))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture(scope="module")
def matrix():
    task = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)
    return task, task.Model(n_layers=2, n_heads=2, d_model=16, init_std=0.4)


@pytest.fixture(scope="module")
def run(matrix, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "matrix", *matrix)


@pytest.fixture(scope="module")
def addition(tmp_path_factory):
    task = tasks.get("modular-addition", p=7)
    settings = task.Model(n_layers=1, n_heads=2, d_model=8, init="nanda", normalization=None)
    folder = tmp_path_factory.mktemp("runs") / "addition"
    return make_run(folder, task, settings, steps=(10, 25), first=0.0, last=0.0)


@pytest.fixture(scope="module")
def found(run):
    return report(run, samples=SAMPLES)


@pytest.fixture(scope="module")
def html(found):
    return found.page().html()


def test_a_source_is_a_run_some_of_its_steps_or_one_checkpoint(run):
    whole = read_source(run)
    assert [each.step for each in whole.checkpoints] == [0, 10, 40]
    assert whole.curve is not None
    assert (whole.curve.drop.onset, whole.curve.drop.end) == (19, 20)
    assert whole.marks == {"pre": 10, "onset": 10, "end": 40, "post": 40}
    assert [each.step for each in read_source(f"{run}@40,10").checkpoints] == [10, 40]
    alone = read_source(f"{run}/checkpoints/00000010")
    assert [each.step for each in alone.checkpoints] == [10]


def test_a_source_says_what_it_lacks(run, addition, tmp_path, matrix):
    flat = read_source(addition)
    assert flat.curve is not None
    assert flat.curve.drop is None
    assert "shows no drop" in flat.missing[0]
    task, settings = matrix
    bare = save_checkpoint(tmp_path / "bare", task.build_model(0, settings), task, step=3)
    assert "A checkpoint on its own" in read_source(str(bare)).missing[0]


def test_mistakes_are_refused_before_anything_is_measured(run, addition):
    for given, said in (
        ((f"{run}@11", None), "no checkpoint at step 11"),
        ((f"{run}/nowhere", None), "no run or checkpoint folder"),
        ((run, run), "the same checkpoints"),
    ):
        with pytest.raises(UserError, match=said):
            check_report(*given, {})
    with pytest.raises(UserError, match="names 2 runs"):
        read_source("zoo:modular-arithmetic-sweeps/addition/seed-[12]")


def test_nearest_steps():
    assert nearest([0, 10, 24, 26, 100], [0, 20, 30]) == [0, 0, 1, 2, 2]


def test_metrics_shown_are_few_and_no_parts_of_others():
    names = ["loss", "accuracy", "loss_2", "accuracy_2", "loss (4x4)"]
    assert shown_metrics(names, "accuracy") == ("accuracy", "loss")
    assert shown_metrics("abcde", "d") == ("d", "a", "b")


def test_effects_are_those_of_the_experiment(found, run):
    ours = found.effects()
    theirs = experiments.heads(f"{run}@40", "zero", samples=SAMPLES).frame
    columns = ["value", "baseline", "effect", "effect_ci_low", "effect_ci_high"]
    for metric in ("mse_masked", "mse_observed"):
        for variant in ("0.1", "layer 1", "all"):
            mine = ours[(ours["step"] == 40) & (ours["intervention"] == "zero")]
            one, other = (
                frame[(frame["metric"] == metric) & (frame["variant"] == variant)][columns].to_numpy(float)
                for frame in (mine, theirs)
            )
            assert one.shape == (1, len(columns))
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


def test_maps_lie_layers_down_heads_across(found, run, matrix):
    task, settings = matrix
    view = found.views[0]
    tokens = task.sample(SAMPLES, seed=0, split="test").tokens
    expected = patterns.attention(task.build_model(10, settings), tokens).mean.numpy()
    whole = tiled(view, gap=1)
    assert whole.shape == (3, 2 * 10 - 1, 2 * 10 - 1)
    np.testing.assert_allclose(whole[1, 10:, :9], expected[1, 0], atol=1e-6)
    assert np.isnan(whole[:, 9]).all()
    names = places("head", 2, position_labels(task, 9), 1, "key")
    assert len(names) == len(set(names)) == 19
    assert names[10 + 5] == "head 1, key (1,2)"


def test_positions_are_called_what_stands_there():
    assert position_labels(tasks.get("modular-addition", p=7), 3) == ["0 (a)", "1 (b)", "2"]
    assert position_labels(None, 2) == ["0", "1"]


def test_fourier_norms_by_numpy():
    rows = np.random.default_rng(0).normal(size=(7, 5))
    amplitudes = np.fft.rfft(rows, axis=0)
    power = (np.abs(amplitudes) ** 2).sum(1) / 7 * np.array([1, 2, 2, 2])
    norms, bound = fourier_norms(rows)
    np.testing.assert_allclose(norms, np.sqrt(power[1:]))
    np.testing.assert_allclose(bound, np.sqrt(power).mean() + np.sqrt(power).std())


def moves_of(html):
    """The parts of every stepped figure, by what its alternative text begins with."""
    texts = re.findall(r'id="([^"]+)"(?: data-picks="[^"]*")? role="img" aria-label="([^"]+)"', html)
    found = {}
    for identifier, alt in texts:
        moved = re.search(
            rf'<script type="application/json" id="{identifier}-moves">(.*?)</script>', html, re.S
        )
        if moved:
            found[alt] = json.loads(moved[1])
    return found


def test_every_figure_of_the_page_moves(html):
    moves = moves_of(html)
    assert html.count('class="plot"') == len(moves)
    for part in ("attention maps", "effects of", "tokens on", "positions on", "singular values", "mse_all"):
        assert any(part in alt for alt in moves), part
    for alt, each in moves.items():
        assert each["at"] == [0, 1, 2], alt
        for values in each["paths"].values():
            frames = values if isinstance(values, list) else values["shape"]
            assert len(frames) == 3 if isinstance(values, list) else frames[0] == 3


def test_principal_components_are_those_of_the_last_checkpoint(found, html):
    moves = next(each for alt, each in moves_of(html).items() if "positions on" in alt)
    tables = [snapshot.positions for snapshot in found.views[0].snapshots]
    centred = [table - table.mean(0) for table in tables]
    axes = np.linalg.svd(centred[-1], full_matrices=False)[2][:2]
    for frame, table in enumerate(centred):
        shown = np.array([moves["paths"][f"data.0.{axis}"][frame] for axis in "xy"]).T
        np.testing.assert_allclose(np.abs(shown), np.abs(table @ axes.T), rtol=1e-3, atol=1e-4)


def test_published_numbers_are_drawn_in_our_unit(found, matrix):
    published = found.published[found.views[0].name]
    variance = matrix[0].entry_variance
    marks = {(mark.metric, mark.step, mark.of_curve): mark.value for mark in published.marks}
    assert marks["mse_masked", 40, False] == pytest.approx(0.98 * variance)
    assert marks["mse_observed", 10, False] == pytest.approx(0.0014 * variance)
    # Before the drop the error stays what it is in our model, not in theirs.
    effects = found.effects()
    here = (effects["step"] == 10) & (effects["metric"] == "mse_masked")
    assert marks["mse_masked", 10, False] == pytest.approx(effects[here]["baseline"].iloc[0])
    verdicts = {outcome.claim.id: outcome.verdict for _, outcome in published.outcomes}
    # One training run decides nothing that is said of training.
    assert set(verdicts.values()) == {"undecided"}
    reasons = {outcome.claim.id: outcome.reason for _, outcome in published.outcomes}
    assert reasons["curve-drop"] == "one training run, of three at least; this one lies within the rule"


def test_a_verdict_that_all_claims_share_is_said_once(found):
    (name,) = (view.name for view in found.views)
    published = found.published[name]
    (table,) = published_section({name: published})
    text = table.html("x")
    said = f"The verdict on all {len(published.outcomes)} claims: undecided, one training run, of three at least."
    assert said in text
    assert "this one lies within the rule" in text
    assert "verdict" not in [column.key for column in table.columns]
    # One that differs: each stands in its row again.
    paper, outcome = published.outcomes[0]
    mixed = replace(published, outcomes=[(paper, replace(outcome, verdict="holds")), *published.outcomes[1:]])
    (table,) = published_section({name: mixed})
    assert "verdict" in [column.key for column in table.columns]
    assert "The verdict on all" not in table.html("x")


def test_published_claims_of_a_modular_run_are_those_of_runs_with_its_settings(tmp_path):
    """As ``generalisation`` and ``reproduce`` decide them; none for a run of other settings."""

    def beside(ref):
        source = read_source(ref)
        return published_beside(View(source, "", load_checkpoint(source.refs[-1]).task)).outcomes

    name = "zoo:modular-addition-113"
    table = experiments.generalisation(name).frame
    claims = {claim.id: claim for claim in read_paper("nanda").claim if claim.study == "generalisation"}
    found = {outcome.claim.id: outcome for _, outcome in beside(name)}
    assert found == {key: judge(claim, table, name) for key, claim in claims.items()}
    assert {(outcome.verdict, outcome.n_runs) for outcome in found.values()} == {("undecided", 1)}
    assert all("within the rule" in outcome.reason for outcome in found.values())
    other = tmp_path / "other"
    shutil.copytree(zoo_folder() / "modular-addition-113", other)
    described = json.loads((other / "run.json").read_text())
    described["config"]["train"]["weight_decay"] = 1.0
    (other / "run.json").write_text(json.dumps(described))
    assert not beside(str(other))


def test_the_first_two_heads_are_told_apart_by_a_paired_test(run):
    """Against all flips of examples, with heads removed by plain hooks."""
    view = report(f"{run}@last", samples=6).views[0]
    strongest = view.strongest
    checkpoint = load_checkpoint(f"{run}@last")
    batch = checkpoint.task.sample(6, seed=0)

    def sums(head=None):
        def zero(z, hook):
            z[:, :, head[1]] = 0
            return z

        hooks = [] if head is None else [(f"blocks.{head[0]}.attn.hook_z", zero)]
        with torch.no_grad():
            output = checkpoint.model.run_with_hooks(batch.tokens, fwd_hooks=hooks)
        total, count = checkpoint.task.metrics(output, batch)["mse_masked"]
        return total.double().numpy(), count.double().numpy()

    plain, count = sums()
    every = {(layer, head): sums((layer, head))[0] - plain for layer in (0, 1) for head in (0, 1)}
    ranked = sorted(every, key=lambda head: -abs(every[head].sum()))[:2]
    assert [(row["layer"], row["head"]) for row in strongest.rows] == ranked
    for row, head in zip(strongest.rows, ranked, strict=True):
        assert row["effect"] == pytest.approx(every[head].sum() / count.sum(), rel=1e-5)
    # How far each moves the metric, whichever way.
    first, second = (every[head] * np.sign(every[head].sum()) for head in ranked)
    flips = np.array(list(itertools.product((-1, 1), repeat=6)))
    reached = abs(flips @ (first - second)) >= abs((first - second).sum()) * (1 - 1e-9)
    assert strongest.p_value == pytest.approx(reached.mean())


def test_a_head_matters_most_only_where_it_is_told_apart_from_the_next():
    def row(name, effect):
        ends = {"effect_ci_low": effect - 0.01, "effect_ci_high": effect + 0.01}
        return {"variant": name, "effect": effect, "n": 1256, **ends}

    rows = (row("0.1", -0.3), row("0.2", 0.25))
    apart = heads_sentence(Strongest("zero", rows, 0.049), "loss")
    assert (
        "(mode zero, 1,256 examples), head 0.1 matters most: it moves loss by -0.300 [-0.310, -0.290], "
        in apart
    )
    assert "and the runner-up, head 0.2, by +0.250 [0.240, 0.260] (paired test, p 0.049)" in apart
    level = heads_sentence(Strongest("zero", rows, 0.05), "loss")
    assert "(mode zero, 1,256 examples), heads 0.1 and 0.2 move loss most, by" in level
    assert "and cannot be told apart (paired test" in level
    shares = heads_sentence(Strongest("zero", rows, 0.05), "accuracy")
    assert "move accuracy most, by -30.0 [-31.0, -29.0] points and +25.0 [24.0, 26.0] points" in shares
    assert "p 0.050" in level
    untested = heads_sentence(Strongest("zero", rows, None), "kl")
    assert "matters" not in level + untested
    assert "told apart" not in untested


def test_the_first_screen_has_sentences_slider_and_curve_and_folds_the_settings(html):
    places = [
        html.index(part)
        for part in ("<ul>", 'class="stepper"', "over training of", "<details>", "checkpoints shown")
    ]
    assert places == sorted(places)
    assert html[: html.index('class="stepper"')].count("<li>") <= 3


def test_headlines_of_two_runs_and_nearest_steps(run, addition, matrix, tmp_path):
    other = make_run(tmp_path / "other", *matrix, steps=(4, 38))
    both = report(run, other, samples=4)
    assert [list(view.at) for view in both.views] == [[0, 1, 2], [0, 0, 1]]
    rows = both.headlines()
    assert set(rows[0]) == {"quantity", run, other}
    assert {row["quantity"]: row[other] for row in rows}["checkpoints shown"] == "2, steps 4 to 38"
    html = both.page().html()
    assert "step 40 (end, post) beside step 38" in html
    assert sum("attention maps" in alt for alt in moves_of(html)) == 2


def test_runs_of_tasks_without_a_metric_in_common(run, addition):
    html = report(f"{run}@last", f"{addition}@last", samples=8).page().html()
    assert "mse_masked: zero" in html  # above a map of effects
    assert "accuracy: zero" in html


def test_a_run_without_a_drop_on_a_cycle(addition):
    found = report(addition, samples=4)
    html = found.page().html()
    assert any("Fourier norms" in alt for alt in moves_of(html))
    assert "shows no drop" in html
    assert {"quantity": "rise of accuracy", addition: "none found"} in found.headlines()


def test_one_checkpoint_on_bare_tokens(run):
    tokens = torch.randint(0, 5, (3, 9)).numpy()
    found = report(f"{run}/checkpoints/00000010", tokens=tokens)
    html = found.page().html()
    assert "disabled" in re.search(r'<input type="range"[^>]*>', html)[0]
    assert "no task" in html
    assert found.views[0].metrics


def test_what_would_make_the_page_too_large_is_left_out(found, monkeypatch):
    monkeypatch.setattr("interp_tasks.report.attention.MAX_NUMBERS", 3 * 2 * 2 * 81 - 1)
    section = attention_section(found.views)
    assert isinstance(section, Text)
    assert section.body.startswith("Left out: 972 numbers")


@pytest.mark.parametrize("largest", [0.0046, 0.0171, 0.1, 1.0, 3e-7])
def test_a_colour_bar_of_effects_has_numbers_near_its_ends(found, largest):
    """Ticks that plotly chooses may be 0 alone, at 0.0046."""
    view = found.views[0]
    section = effect_maps(view, dict.fromkeys(view.metrics, largest), 700)
    bars = [trace.colorbar for trace in section.figure.figure.data if trace.showscale]
    assert len(bars) == len(view.metrics)
    for bar in bars:
        assert list(bar.tickvals) == [-largest, 0, largest]
        said = [float(text.lstrip("≤≥ ").replace("−", "-")) for text in bar.ticktext]
        assert said == pytest.approx(list(bar.tickvals), rel=0.05)


@pytest.mark.parametrize(
    ("lowest", "highest", "said"),
    [
        (-0.3, 0.3, ["−0.3", "0", "0.3"]),
        (-0.4, 0.3, ["≤ −0.3", "0", "0.3"]),
        (-0.1, 2.0, ["−0.3", "0", "≥ 0.3"]),
        # What rounds to the end is no more than it.
        (0.1, 0.301, ["−0.3", "0", "0.3"]),
    ],
)
def test_a_clipped_end_of_a_colour_bar_says_so(lowest, highest, said):
    assert ticks(0.3, lowest, highest)["ticktext"] == said


def unpacked(packed):
    """What the page makes of it, in numpy."""
    low, high = np.frombuffer(zlib.decompress(base64.b64decode(packed.data)), np.uint8).reshape(2, -1)
    levels = (low + 256.0 * high).reshape(packed.shape)
    return np.where(levels > packed.levels, np.nan, packed.low + packed.unit * levels)


def test_packed_numbers_come_back_to_half_a_level():
    values = np.random.default_rng(0).uniform(-2, 3, (4, 20, 30))
    values[1, 2] = np.nan
    for budget, levels in ((None, 65534), (6000, 4094), (1, 254)):
        packed = pack(values, budget)
        assert packed.levels == levels
        found = unpacked(packed)
        assert (np.isnan(found) == np.isnan(values)).all()
        assert np.nanmax(np.abs(found - values)) <= 0.5 * packed.unit * (1 + 1e-9)
        assert packed.unit == pytest.approx((np.nanmax(values) - np.nanmin(values)) / levels)
    assert (unpacked(pack(np.full((1, 2, 2), 0.25))) == 0.25).all()
    for wrong in (np.zeros((2, 2)), np.full((1, 1, 1), np.inf)):
        with pytest.raises(ValueError, match="finite numbers"):
            pack(wrong)


def test_fifty_checkpoints_of_32_heads_fit_whatever_they_attend_to():
    """A tenth of them, of noise, which nothing compresses: the page is the maps, plotly, and a megabyte or two."""
    from plotly.offline import get_plotlyjs

    from interp_tasks.report.attention import BUDGET

    noise = np.random.default_rng(0).uniform(size=(5, 4 * 49, 8 * 49))
    assert 10 * noise.size < MAX_NUMBERS
    maps = len(pack(noise, BUDGET // 10).data)
    assert maps <= BUDGET // 10
    assert 10 * maps + len(deflated(get_plotlyjs())) + 2e6 < 15e6


def test_slider_says_its_steps():
    html = Slider(["step 0", "step <1>"], {"post": 1}, start=1, meanings={"post": "the last"}).html("s")
    assert '<label for="s">' in html
    assert 'aria-valuetext="step &lt;1&gt;"' in html
    assert 'min="0" max="1" step="1" value="1"' in html
    assert 'data-index="1"' in html
    assert 'title="the last: step &lt;1&gt;"' in html
    assert "</script><" not in html.removesuffix("</script>")


def test_stepped_sections_escape_what_came_from_outside():
    import plotly.graph_objects as go

    figure = Figure(go.Figure(), alt="</script>&")
    html = Stepped(figure, {"data.0.name": ["</script>"]}, [0], picks=[1]).html("x")
    assert html.count("</script>") == 2
    table = Table(pandas.DataFrame({"a": ["</script>", "b"]}), "T", name="t")
    html = SteppedTable(table, [(0, 1), (1, 2)]).html("y")
    rows = json.loads(zlib.decompress(base64.b64decode(re.search(r'id="y-rows">([^<]*)<', html)[1])))
    assert rows["cells"] == [[["</script>", "</script>"]], [["b", "b"]]]
    assert rows["frames"] == [[0, 1], [1, 2]]


def test_command_writes_the_page_and_prints_its_head(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "report", "--ckpt", f"{run}@10,40", "--samples", "4", "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "wrote report.html\n"
    rows = json.loads(captured.out)
    assert {"quantity": "checkpoints shown", run: "2, steps 10 to 40"} in rows
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "step 40 (end, post)" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no run or checkpoint folder 'nowhere'"),
        (["zoo:matrix-completion-4x4", "--out", "."], "it is a folder"),
        (["zoo:matrix-completion-4x4", "--out", "page.png"], "name a file that ends in .html"),
        (["zoo:matrix-completion-4x4", "--samples", "0"], "at least one example"),
        (["zoo:matrix-completion-4x4", "--device", "gpu"], "write cpu, cuda"),
        (["zoo:matrix-completion-4x4", "--compare", "zoo:no"], "no zoo:no"),
    ],
)
def test_mistakes_are_one_line(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "report", "--ckpt", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_circuits_are_those_of_the_experiment_and_stand_on_the_page(addition):
    run = "zoo:modular-addition-113@0,3000"
    found = report(run, samples=40, circuit=True)
    frame = found.circuits()
    by_hand = experiments.circuit(run, samples=40, curve=False).frame
    by_hand = by_hand[by_hand["variant"] == "circuit"].set_index(["step", "metric"])
    assert frame["step"].tolist() == [0, 3000]
    assert frame["size"].isna().tolist() == [True, False]
    for row in frame.to_dict("records"):
        step = row["step"]
        assert row["total"] == by_hand.loc[(step, "size"), "baseline"]
        assert row["clean"] == by_hand.loc[(step, row["metric"]), "baseline"]
        for column, metric in (("size", "size"), ("faithfulness", "faithfulness")):
            asked = by_hand["value"].get((step, metric), float("nan"))
            assert row[column] == pytest.approx(asked, nan_ok=True)
    html = found.page().html()
    assert "The smallest faithful circuit over training" in html
    assert [row for row in found.headlines() if row["quantity"].startswith("smallest faithful circuit")]
    plain = report(f"{addition}@10", samples=8)
    assert plain.circuits().empty
    assert "The smallest faithful circuit" not in plain.page().html()


def test_a_circuit_needs_two_halves(run):
    with pytest.raises(UserError, match="--circuit with --samples 3: one half finds the circuit"):
        check_report(run, None, {"samples": 3}, circuit=True)
