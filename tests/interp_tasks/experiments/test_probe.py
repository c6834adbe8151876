"""`interp-run probe` and its experiment: what it asks of a task, against scikit-learn on plain caches of the model."""

import json
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from transformer_lens import HookedTransformerConfig

import tasks
from interp_tasks.checkpoints import load_checkpoint, save_checkpoint
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.experiments import COLUMNS, ProbeResult, probe
from interp_tasks.measurement.probes import SAMPLES
from interp_tasks.measurement.subjects import Examples, subjects
from interp_tasks.measurement.table import shown_columns, shown_rows
from interp_tasks.measurement.untrained import untrained
from tasks import ProbeTarget, ProbeTargets
from tasks.hooked import construct
from tasks.modular_arithmetic.remainders import Miiii

MATRIX, ADDITION = "zoo:matrix-completion-4x4@post", "zoo:modular-addition-113@post"
N = 60


def rows(frame, against="shuffled targets", **where):
    found = frame[frame["intervention"].str.endswith(against)]
    for name, wanted in where.items():
        found = found[found[name] == wanted]
    return found


def one(frame, column="value", **where):
    (value,) = rows(frame, **where)[column]
    return value


@pytest.fixture(scope="module")
def shipped():
    return probe(MATRIX, samples=400, seed=1)


def test_numbers_of_a_shipped_model_are_those_of_scikit_learn(shipped):
    checkpoint = load_checkpoint(MATRIX)
    batch = checkpoint.task.sample(400, seed=1)
    hidden = batch.extras["hidden"]
    _, cache = checkpoint.model.run_with_cache(batch.tokens)
    held_out = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:100].sort().values
    train = torch.ones(400, dtype=torch.bool)
    train[held_out] = False
    x_matrix = batch.targets.unflatten(1, (4, 4))
    masked = x_matrix.masked_fill(hidden.unflatten(1, (4, 4)), 0)
    u = np.linalg.svd(x_matrix.double().numpy())[0][:, :, 0]
    by_position = {
        "true_element": batch.targets[..., None].double(),
        "masked_row": masked[:, torch.arange(16) // 4].double(),
        "left_projector": torch.from_numpy(u[:, :, None] * u[:, None]).reshape(400, 1, 16).expand(-1, 16, -1),
    }
    for name, target in by_position.items():
        for layer in range(3):
            activation = cache[f"blocks.{layer}.hook_resid_post"].detach().double()
            fitted = LinearRegression(fit_intercept=False).fit(
                activation[train].flatten(0, 1), target[train].flatten(0, 1)
            )
            predicted = fitted.predict(activation[held_out].flatten(0, 1)).reshape(-1, target.shape[2])
            true = target[held_out].flatten(0, 1).numpy()
            for split, chosen in (("", hidden | True), (" (hidden)", hidden), (" (observed)", ~hidden)):
                inside = chosen[held_out].flatten().numpy()
                variant = f"{name} resid_post.{layer}"
                error = one(shipped.frame, variant=variant, metric=f"mse{split}")
                assert error == pytest.approx(((predicted - true)[inside] ** 2).mean(), rel=1e-5)
                r2 = r2_score(true[inside], predicted[inside], multioutput="variance_weighted")
                assert one(shipped.frame, variant=variant, metric=f"r2{split}") == pytest.approx(r2, abs=1e-5)
                if name == "masked_row":
                    p, t = torch.from_numpy(predicted[inside]), torch.from_numpy(true[inside])
                    kept = t.norm(dim=1) > 0
                    cosine = torch.nn.functional.cosine_similarity(p[kept], t[kept]).abs().mean().item()
                    assert one(shipped.frame, variant=variant, metric=f"abs_cosine{split}") == pytest.approx(
                        cosine, rel=1e-5
                    )


def test_the_trained_model_knows_hidden_entries_better_with_depth_and_an_untrained_one_does_not(shipped):
    """As published of the larger model (appendix K)."""
    r2 = [
        one(shipped.frame, variant=f"true_element resid_post.{layer}", metric="r2 (hidden)")
        for layer in range(3)
    ]
    assert r2[0] < r2[1] < r2[2]
    for column in ("effect_ci_low", "effect"):
        assert one(shipped.frame, column, variant="true_element resid_post.2", metric="r2 (hidden)") > 0.5
        assert (
            one(
                shipped.frame,
                column,
                variant="true_element resid_post.2",
                metric="r2 (hidden)",
                against="untrained model",
            )
            > 0.5
        )
    without = one(
        shipped.frame,
        "baseline",
        variant="true_element resid_post.2",
        metric="r2 (hidden)",
        against="untrained model",
    )
    assert without < 0.05


def test_an_untrained_model_keeps_operands_that_training_throws_away():
    frame = probe(ADDITION, targets=["a", "b", "sum"]).frame
    untrained = "untrained model"
    found = {
        name: (
            round(one(frame, variant=f"{name} resid_post.0", metric="accuracy"), 2),
            round(
                one(frame, "baseline", variant=f"{name} resid_post.0", metric="accuracy", against=untrained),
                2,
            ),
        )
        for name in ("a", "b", "sum")
    }
    (a, a0), (b, b0), (total, total0) = found.values()
    assert a0 > a
    assert b0 > b
    assert total > 0.5 > total0


def test_the_note_on_what_else_was_measured_is_true(shipped):
    also = [note for note in shipped.notes if note.startswith("Also measured")]
    assert also == ["Also measured: mse and cosine; see --format json or csv, --out, --plot."]
    of_classes = probe(ADDITION, targets=["a"], samples=60, untrained=False)
    assert set(of_classes.frame["metric"]) == {"accuracy"}
    assert not any("measured" in note or "cosine" in note for note in of_classes.notes)


def test_the_table(shipped):
    frame = shipped.frame
    assert isinstance(shipped, ProbeResult)
    assert tuple(frame.columns) == COLUMNS
    assert set(frame["n"]) == {100}
    assert set(frame["metric"]) == {
        f"{metric}{split}"
        for metric in ("mse", "r2", "cosine", "abs_cosine")
        for split in ("", " (hidden)", " (observed)")
    }
    assert np.allclose(frame["effect"], frame["value"] - frame["baseline"])
    assert (frame["value_ci_low"] <= frame["value"]).all()
    assert (frame["value"] <= frame["value_ci_high"]).all()
    pair = rows(frame)["value"].tolist(), rows(frame, "untrained model")["value"].tolist()
    assert pair[0] == pair[1], "both controls stand beside the same values"
    assert set(frame["site"]) == {"resid_post"}
    assert sorted(set(frame["layer"])) == [0, 1, 2]
    assert "1,536" not in " ".join(shipped.notes)
    assert "fitted on 300 examples, scored on 100 others" in shipped.notes[0]
    people = shown_rows(frame)
    assert len(people) == 3 * 3 * (1 + 7 * 2), (
        "entries, and seven targets of several numbers, in three splits and layers"
    )
    merged = people.set_index(["variant", "metric"])["untrained"]
    other = rows(frame, "untrained model").set_index(["variant", "metric"])["baseline"]
    assert merged.equals(other[merged.index].rename("untrained"))
    assert [column.header for column in shown_columns(people)] == [
        *("variant", "metric", "baseline", "untrained", "value [95% CI]", "effect"),
    ]


def test_the_figure_and_the_page(shipped):
    figure = shipped.plot()
    # A long name is broken into lines, at a space or behind a mark.
    titles = ["".join(note.text.replace("<br>", "").split()) for note in figure.layout.annotations]
    assert titles[:2] == ["true_element:mse", "true_element:r2"]
    assert "masked_row:abs_cosine" in titles
    (line,) = (t for t in figure.data if t.name == "hidden entries" and t.yaxis == "y2")
    assert list(line.y) == [
        one(shipped.frame, variant=f"true_element resid_post.{layer}", metric="r2 (hidden)")
        for layer in range(3)
    ]
    named = [t.name for t in figure.data if t.showlegend]
    assert named == ["all entries", "hidden entries", "observed entries"]
    assert {t.line.dash for t in figure.data if t.name == "hidden entries, untrained"} == {"dash"}
    html = shipped.page().html()
    assert "probe: least squares<" in html
    assert "exchanged between examples" in html


def test_operands_and_sum_of_modular_addition():
    found = probe(ADDITION, ("resid_pre", "resid_post"), samples=1200).frame
    assert set(found["metric"]) == {"accuracy"}
    names = [
        "a resid_pre.0",
        "a resid_post.0",
        "b resid_pre.0",
        "b resid_post.0",
        "sum resid_pre.0",
        "sum resid_post.0",
    ]
    assert list(dict.fromkeys(found["variant"])) == names
    for target in ("a", "b", "sum"):
        # '=' is the same in every input before attention.
        assert one(found, "effect", variant=f"{target} resid_pre.0") == 0
        assert one(found, "effect_ci_low", variant=f"{target} resid_post.0") > 0.1
    more = {
        target: one(found, "effect", variant=f"{target} resid_post.0", against="untrained model")
        for target in ("a", "sum")
    }
    assert more["sum"] > 0.3 > more["a"], "the sum is what training has made readable"


def test_targets_of_the_tasks():
    matrix = tasks.get("matrix-completion", n=3, m=4, rank=2)
    batch = matrix.sample(20, seed=3)
    found = matrix.probe_targets(batch)
    assert {target.kind for target in found.targets.values()} == {"regression"}
    hidden = batch.extras["hidden"]
    assert torch.equal(found.splits["hidden"], hidden)
    assert torch.equal(found.splits["observed"], ~hidden)
    assert found.positions is None
    x = batch.targets.unflatten(1, (3, 4)).double()
    u, v = (found.targets[f"{side}_vector"].values[:, 0] for side in ("left", "right"))
    for example in range(20):
        for position in (0, 5, 11):
            row = [
                0.0
                if hidden[example, 4 * (position // 4) + j]
                else batch.targets[example, 4 * (position // 4) + j]
                for j in range(4)
            ]
            assert found.targets["masked_row"].values[example, position].tolist() == row
            assert found.targets["true_element"].values[example, position] == batch.targets[example, position]
        # The best approximation of rank 1: uᵀX = σ vᵀ, with the largest σ.
        sigma = u[example] @ x[example] @ v[example]
        assert float(sigma) == pytest.approx(np.linalg.norm(x[example], 2))
        assert torch.allclose(x[example] @ v[example], sigma * u[example], atol=1e-12)
        for side, vector in (("left", u), ("right", v)):
            projector = found.targets[f"{side}_projector"].values[example, 0].reshape(len(vector[0]), -1)
            assert torch.allclose(projector, torch.outer(vector[example], vector[example]))
    for name, config, answers in (
        ("modular-addition", {"p": 7}, {}),
        ("modular-multiplication", {"p": 7}, {"product": lambda a, b: a * b % 7}),
        ("miiii", {"p": 7}, {f"mod_{q}": lambda a, b, q=q: (a + 7 * b) % q for q in (2, 3, 5)}),
    ):
        task = tasks.get(name, **config)
        batch = task.sample(20, seed=3)
        found = task.probe_targets(batch)
        a, b = batch.tokens[:, 0], batch.tokens[:, 1]
        digits = ["x0", "x1"] if name == "miiii" else ["a", "b"]
        assert list(found.targets) == [*digits, "sum", *answers]
        assert {target.kind for target in found.targets.values()} == {"classification"}
        assert found.positions == (2,)
        expected = {
            digits[0]: a,
            digits[1]: b,
            "sum": (a + b) % 7,
            **{q: make(a, b) for q, make in answers.items()},
        }
        for target, values in expected.items():
            assert torch.equal(found.targets[target].values, values), (name, target)
    assert Miiii(p=7, digits="high-first").probe_targets(batch).targets.keys() >= {"x0", "x1"}


def test_the_untrained_model_is_one_of_this_architecture_and_initialisation(tmp_path):
    for ref, scale in ((MATRIX, 0.1), ("zoo:matrix-completion-4x4-small-init@post", 0.02)):
        (subject,) = subjects(ref, Examples(samples=4))
        model = untrained(subject)
        assert {n: p.shape for n, p in model.named_parameters()} == {
            n: p.shape for n, p in subject.model.named_parameters()
        }
        assert model.W_Q.std().item() == pytest.approx(scale, rel=0.05), "as run.json says"
        if ref == MATRIX:
            first = load_checkpoint(ref.replace("@post", "@0")).model
            # Stored weights are rounded.
            assert (model.W_Q - first.W_Q).abs().max() > 0.1, "no run began as this one"
        assert torch.equal(model.W_Q, untrained(subject).W_Q)
        assert not torch.equal(model.W_Q, untrained(next(subjects(ref, Examples(samples=4, seed=1)))).W_Q)
    task = tasks.get("matrix-completion", n=3, rank=1)
    settings = task.Model(n_layers=2, n_heads=2, d_model=8, d_mlp=12, d_head=3, n_ctx=11, act_fn="relu")
    alone = save_checkpoint(tmp_path / "alone", task.build_model(0, settings), task)
    (subject,) = subjects(str(alone), Examples(samples=4))
    model = untrained(subject)
    for name in ("d_head", "d_mlp", "n_ctx", "act_fn", "attention_dir", "normalization_type", "n_layers"):
        assert getattr(model.cfg, name) == getattr(subject.model.cfg, name)


def test_options_reach_the_probes(folders):
    base = {"samples": N, "targets": "true_element", "seed": 2}
    plain = probe(folders[0], **base)
    assert plain.config["method"] == "least squares"
    assert set(plain.frame["n"]) == {15}
    changed = {
        "intercept": probe(folders[0], intercept=True, **base),
        "ridge": probe(folders[0], ridge="5", **base),
        "held_out": probe(folders[0], held_out=20, **base),
        "positions": probe(folders[0], positions="0,-1", **base),
    }
    for result in changed.values():
        assert not np.allclose(result.frame["value"], plain.frame["value"])
    assert set(changed["held_out"].frame["n"]) == {20}
    assert set(changed["ridge"].frame["intervention"]) == {
        "ridge(5), against shuffled targets",
        "ridge(5), against the untrained model",
    }
    table = next(iter(probe(folders[0], ridge="0.1,3,50", folds=3, **base).tables.values()))
    assert set(table["ridge"]) <= {0.1, 3.0, 50.0}
    each = probe(folders[0], positions="0,4", each_position=True, **base).frame
    assert set(each["position"]) == {0, 4}
    assert "true_element resid_post.1@4" in set(each["variant"])
    heads = probe(folders[0], ("z", "pattern.1"), heads="1.0", **base).frame
    assert set(heads["variant"]) == {"true_element z.1.0", "true_element pattern.1.0"}
    assert set(heads["head"]) == {0}
    without = probe(folders[0], untrained=False, **base).frame
    assert set(without["intervention"]) == {"least squares, against shuffled targets"}
    assert "untrained" not in [column.header for column in shown_columns(shown_rows(without))]
    more = probe(folders[0], shuffles=4, **base).frame
    assert (more["baseline"] != plain.frame["baseline"]).any()
    several = probe(folders, **base)
    assert list(several.tables) == folders
    assert set(several.frame["ref"]) == set(folders)


def test_more_examples_than_elsewhere_unless_asked():
    seen = {}

    class Counted(tasks.task_class("modular-addition")):
        name: ClassVar[str] = "counted"

        def probe_targets(self, batch):
            seen["n"] = len(batch)
            return ProbeTargets({"a": ProbeTarget(batch.tokens[:, 0], "classification")}, positions=(2,))

    probe(ADDITION, task=Counted(p=113))
    assert seen["n"] == SAMPLES
    probe(ADDITION, task=Counted(p=113), samples=50)
    assert seen["n"] == 50


def test_the_command(folders, capsys, monkeypatch):
    arguments = ["--samples", "40", "--target", "true_element", "--site", "resid_pre.1", "--quiet"]
    assert main(["probe", "--ckpt", folders[0], *arguments, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {tuple(row) for row in found} == {COLUMNS}
    same = probe(folders[0], "resid_pre.1", "true_element", samples=40)
    assert [row["value"] for row in found] == same.frame["value"].tolist()
    options = ["--intercept", "--ridge", "0.1,1", "--folds", "3", "--held-out", "12", "--shuffles", "2"]
    options += ["--no-untrained", "--positions", "0,1", "--each-position"]
    assert main(["probe", "--ckpt", folders[0], *arguments, *options, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    same = probe(
        folders[0],
        "resid_pre.1",
        "true_element",
        samples=40,
        intercept=True,
        ridge=(0.1, 1.0),
        folds=3,
        held_out=12,
        shuffles=2,
        untrained=False,
        positions=(0, 1),
        each_position=True,
    ).frame
    assert [(row["value"], row["baseline"], row["position"]) for row in found] == list(
        zip(same["value"], same["baseline"], same["position"], strict=True)
    )
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["probe", "--ckpt", folders[0], *arguments]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 120
    assert "untrained" in printed


REFUSED = {
    "no such target": (["--target", "true_elment"], "declares true_element, masked_row"),
    "no such site": (["--site", "resid"], "no site 'resid'"),
    "heads where there are none": (["--heads", "0.1"], "has no heads"),
    "penalty unreadable": (["--ridge", "0.1;1"], "such as 0.1,1,10"),
    "penalty negative": (["--ridge=-1"], "such as 0.1,1,10"),
    "one fold": (["--folds", "1"], "at least 2"),
    "nothing held out": (["--held-out", "0"], "a fraction below 1"),
    "one and a half held out": (["--held-out", "2.5"], "a fraction below 1"),
    "all held out": (["--held-out", "40"], "a number below 40"),
    "no shuffle": (["--shuffles", "0"], "at least 1"),
    "too few examples": (["--samples", "2"], "2 to fit"),
    "no such position": (["--positions", "9"], "positions 0-8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_is_one_line(folders, capsys, what):
    arguments, expected = REFUSED[what]
    given = [] if "--samples" in arguments else ["--samples", "40"]
    assert main(["probe", "--ckpt", folders[0], *given, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert expected in captured.err


def test_a_checkpoint_without_a_task_or_targets(models, tmp_path, capsys):
    bare = str(save_checkpoint(tmp_path / "bare", models[0]))
    assert main(["probe", "--ckpt", bare]) == 2
    assert "names no task: say --task NAME" in capsys.readouterr().err
    np.save(tmp_path / "tokens.npy", np.ones((20, 9), dtype=int))
    assert main(["probe", "--ckpt", bare, "--tokens", str(tmp_path / "tokens.npy")]) == 2
    assert "leave --tokens out, or give --task NAME" in capsys.readouterr().err

    class Silent(tasks.task_class("modular-addition")):
        name: ClassVar[str] = "silent"

        def probe_targets(self, batch):
            return ProbeTargets()

    with pytest.raises(UserError, match=r"'silent' declares no targets for probes: .*probe_targets"):
        probe(ADDITION, task=Silent(p=113), samples=8)


def test_an_architecture_that_the_task_does_not_build(task, models, tmp_path):
    same = ("d_model", "n_layers", "n_heads", "d_head", "d_mlp", "n_ctx", "d_vocab", "d_vocab_out", "act_fn")
    settings = {name: getattr(models[0].cfg, name) for name in same}
    for changes, said in (
        ({"act_fn": "solu"}, "act_fn = 'solu'"),
        ({"positional_embedding_type": "rotary"}, "W_pos"),
    ):
        odd = construct(HookedTransformerConfig(**{**settings, "seed": 0, **changes}, device="cpu"))
        folder = str(save_checkpoint(tmp_path / said[:3], odd, task))
        with pytest.raises(UserError, match=f"{said}.*leave that control out with --no-untrained"):
            probe(folder, samples=N)
        assert len(probe(folder, samples=N, untrained=False).frame)
