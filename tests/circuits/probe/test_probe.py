"""Probes against scikit-learn on the activations themselves, in float64; planted answers."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge, RidgeClassifier
from sklearn.metrics import accuracy_score, mean_squared_error, r2_score

from circuits import CircuitsError, cache, probe, prompts
from circuits.model.prompts_with_mask import Prompts
from circuits.probe._linear_probe import Regression
from circuits.probe._probe_inputs import parse_targets

N, HELD_OUT = 64, 16


@pytest.fixture(scope="module")
def inputs():
    return torch.randint(0, 11, (N, 6), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def hidden():
    return torch.rand(N, 6, generator=torch.Generator().manual_seed(6)) < 0.3


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def flat(activation, examples):
    return activation[examples].flatten(2).flatten(0, 1).numpy()


def fit_and_held_out(seed=0):
    """The examples that `seed` draws."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    return order[HELD_OUT:].sort().values, order[:HELD_OUT].sort().values


def value(frame, metric, **where):
    rows = frame[frame["metric"] == metric]
    for name, wanted in where.items():
        rows = rows[rows[name] == wanted]
    assert len(rows) == 1, rows
    return float(rows["value"].iloc[0])


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [None, 3.0])
def test_regression_is_what_scikit_learn_fits(causal, inputs, hidden, intercept, ridge):
    target = noise(N, 6, 3) + inputs[..., None] * torch.tensor([1.0, 0.0, 0.5]) + 2.0
    target[:, 0] = 0.0  # which has no direction
    splits = {"hidden": hidden, "observed": ~hidden}
    sites = ["resid_post", "z", "mlp_post.1"]
    asked = {"test": HELD_OUT, "intercept": intercept, "ridge": ridge, "splits": splits, "draws": 20}
    found = probe.linear(causal, inputs, target, sites, **asked)
    activations = cache(causal, inputs, sites)
    train, test = fit_and_held_out()
    assert len(found.weights) == 5
    for (place, _), fitted in found.weights.items():
        x, y = flat(activations[place], train), flat(target, train)
        oracle = LinearRegression() if ridge is None else Ridge(ridge)
        oracle.set_params(fit_intercept=intercept).fit(x, y)
        predicted = oracle.predict(flat(activations[place], test))
        close = {"rtol": 1e-7, "atol": 1e-7 * np.abs(y).max()}
        assert np.allclose(
            fitted.predict(torch.from_numpy(flat(activations[place], test))), predicted, **close
        )
        # Singular values below the square root of the tolerance are left out here and kept there.
        assert np.allclose(fitted.weight, oracle.coef_.T, rtol=1e-5, atol=1e-6)
        assert np.allclose(fitted.intercept, oracle.intercept_, rtol=1e-5, atol=1e-6)
        site, layer = place.split(".")
        true = flat(target, test)
        for split, inside in (("all", torch.ones_like(hidden)), *splits.items()):
            chosen = inside[test].flatten().numpy()
            where = {"site": site, "layer": int(layer), "split": split}
            p, t = predicted[chosen], true[chosen]
            assert value(found.frame, "mse", **where) == pytest.approx(mean_squared_error(t, p), rel=1e-7)
            r2 = r2_score(t, p, multioutput="variance_weighted")
            assert value(found.frame, "r2", **where) == pytest.approx(r2, rel=1e-6)
            p, t = p[t.any(1)], t[t.any(1)]
            cosine = (p * t).sum(1) / np.linalg.norm(p, axis=1) / np.linalg.norm(t, axis=1)
            assert value(found.frame, "cosine", **where) == pytest.approx(cosine.mean(), rel=1e-7)
            assert value(found.frame, "abs_cosine", **where) == pytest.approx(np.abs(cosine).mean(), rel=1e-7)
            assert set(found.frame[found.frame["split"] == split]["entries"]) == {int(chosen.sum())}


@pytest.mark.parametrize("intercept", [False, True])
def test_classification_is_least_squares_on_one_hot(causal, inputs, intercept):
    classes = (inputs[:, :1] + inputs) % 5
    kwargs = {"kind": "classification", "test": HELD_OUT, "intercept": intercept, "ridge": 0.5, "draws": 20}
    found = probe.linear(causal, inputs, classes, **kwargs)
    activations = cache(causal, inputs, "resid_post")
    train, test = fit_and_held_out()
    for layer in (0, 1):
        x, y = flat(activations[f"resid_post.{layer}"], train), flat(classes[..., None], train)[:, 0]
        fitted = found.weights[f"resid_post.{layer}", "target"]
        one_hot = Ridge(0.5, fit_intercept=intercept).fit(x, np.eye(5)[y])
        assert np.allclose(fitted.weight, one_hot.coef_.T, atol=1e-9)
        held, true = flat(activations[f"resid_post.{layer}"], test), flat(classes[..., None], test)[:, 0]
        predicted = one_hot.predict(held).argmax(1)
        assert 0.2 < accuracy_score(true, predicted) < 1
        assert value(found.frame, "accuracy", layer=layer) == pytest.approx(accuracy_score(true, predicted))
        if intercept:
            # Its targets are ±1, which is the same up to scale and shift.
            same = RidgeClassifier(0.5).fit(x, y).predict(held)
            assert value(found.frame, "accuracy", layer=layer) == pytest.approx(accuracy_score(true, same))


def test_fewer_entries_than_dimensions_gives_the_map_of_least_norm(causal, inputs):
    target = noise(N, 6, 2)
    for positions, intercept in (([2], False), ([2], True)):
        asked = {"test": range(20, N), "positions": positions, "intercept": intercept, "draws": 20}
        found = probe.linear(causal, inputs, target, "mlp_post.0", **asked)
        x = cache(causal, inputs, "mlp_post.0")["mlp_post.0"][:20, 2].numpy()
        y = target[:20, 2].numpy()
        mean_x, mean_y = (part.mean(0) * intercept for part in (x, y))
        expected, _, rank, _ = np.linalg.lstsq(x - mean_x, y - mean_y, rcond=1e-6)
        fitted = found.weights["mlp_post.0", "target"]
        assert fitted.rank == rank <= 20 < x.shape[1]
        assert np.allclose(fitted.weight, expected, atol=1e-8 * np.abs(expected).max())
        assert set(found.frame["rank"]) == {rank}
        assert set(found.frame["fit_n"]) == {20}


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("outlier", [1, 3000])
@pytest.mark.parametrize("where", ["feature", "vector"])
def test_a_massive_activation_hides_no_direction_in_half_precision(outlier, where, intercept):
    """Against least squares in float64 by numpy; an eighth of the entries have the outlier, as a first token's do."""
    x = noise(2000, 32) @ torch.linalg.qr(noise(32, 32, seed=1)).Q
    planted = x @ noise(32, 1, seed=2)
    first = torch.arange(len(x)) % 8 == 0
    x[first] = noise(32, seed=3)
    at = {"feature": [3], "vector": list(range(32))}[where]
    x[:, at] *= torch.where(first, outlier, 1)[:, None]
    y = planted * ~first[:, None] + 4 * noise(2000, 1, seed=4)
    x = x.bfloat16().double()
    fits = Regression(x[:1500], intercept, 2**-7)
    weight, bias = fits.fit_weight_and_bias(y[:1500], 1, 0.0)
    oracle = LinearRegression(fit_intercept=intercept).fit(x[:1500], y[:1500])
    assert fits.rank == 32
    np.testing.assert_allclose((x @ weight + bias).numpy(), oracle.predict(x), atol=1e-6)


def test_each_head_alone_all_together_and_patterns(causal, inputs):
    z, pattern = (cache(causal, inputs, site)[f"{site}.1"] for site in ("z", "pattern"))
    weight = noise(4, 1, seed=2)
    target = z[:, :, 2] @ weight
    found = probe.linear(causal, inputs, target, "z", heads="1.0, 1.2", draws=20)
    assert [key for key, _ in found.weights] == ["z.1.0", "z.1.2"]
    assert value(found.frame, "r2", head=2) == pytest.approx(1, abs=1e-10)
    assert value(found.frame, "r2", head=0) < 0.9
    assert torch.allclose(found.weights["z.1.2", "target"].weight, weight, atol=1e-8)
    whole = probe.linear(causal, inputs, target, "z.1", draws=20).weights["z.1", "target"].weight
    assert torch.allclose(whole.unflatten(0, (4, 4))[2], weight, atol=1e-6)
    rows = noise(6, 1, seed=4)
    together = pattern.permute(0, 2, 1, 3).flatten(2) @ noise(24, 1, seed=4)
    for read, site, chosen in ((pattern[:, 3] @ rows, "pattern", "1.3"), (together, "pattern.1", None)):
        frame = probe.linear(causal, inputs, read, site, heads=chosen, draws=20).frame
        assert value(frame, "r2") == pytest.approx(1, abs=1e-8)


def test_positions_and_a_mask(causal, inputs, hidden):
    target = noise(N, 6, 1) + inputs[..., None]
    activation = cache(causal, inputs, "resid_post.0")["resid_post.0"]
    train, test = fit_and_held_out()

    def expected(chosen):
        x, y = (part[train][chosen[train]].numpy() for part in (activation, target))
        oracle = LinearRegression(fit_intercept=False).fit(x, y)
        x, y = (part[test][chosen[test]].numpy() for part in (activation, target))
        return mean_squared_error(y, oracle.predict(x))

    def at(*positions):
        chosen = torch.zeros(N, 6, dtype=torch.bool)
        chosen[:, list(positions)] = True
        return chosen

    for positions, chosen in (([1, -1], at(1, 5)), (hidden, hidden), (at(2)[0], at(2))):
        found = probe.linear(
            causal, inputs, target, "resid_post.0", positions=positions, test=HELD_OUT, draws=20
        ).frame
        assert value(found, "mse") == pytest.approx(expected(chosen), rel=1e-8)
        assert set(found["entries"]) == {int(chosen[test].sum())}


def test_passes_that_memory_bounds_give_what_one_gives(causal, inputs, monkeypatch):
    given = (causal, inputs, noise(N, 6) + inputs, ["z", "mlp_out"])
    whole = probe.linear(*given, draws=20)
    monkeypatch.setattr("circuits.probe._linear_probe.MOST_KEPT", 1)
    assert probe.linear(*given, draws=20).frame.equals(whole.frame)


def test_a_target_per_example_is_the_same_at_all_its_positions(causal, inputs):
    vectors = noise(N, 1, 3)
    kwargs = {"draws": 20, "splits": {"first": torch.arange(6) == 0}}
    one = probe.linear(causal, inputs, vectors, **kwargs)
    same = probe.linear(causal, inputs, vectors.expand(N, 6, 3), **kwargs)
    assert one.frame.equals(same.frame)
    numbers = noise(N)
    scalar = probe.linear(causal, inputs, numbers, **kwargs).frame
    assert scalar.equals(probe.linear(causal, inputs, numbers[:, None].expand(N, 6), **kwargs).frame)
    assert set(scalar["metric"]) == {"mse", "r2"}


@pytest.mark.parametrize("number", [0.1, 1 / 3, 1e5 + 0.1])
def test_a_target_that_is_the_same_everywhere_has_no_r2(causal, inputs, number):
    """Its mean is rounded where its numbers are not; the difference is no spread."""
    constant = torch.full((N - 1,), number, dtype=torch.float64)
    found = probe.linear(causal, inputs[1:], constant, "resid_post.0", intercept=True, draws=20).frame
    of_r2 = found[found["metric"] == "r2"]
    assert of_r2[["value", "value_ci_low", "shuffled", "selectivity"]].isna().all(axis=None)


def test_the_shuffled_control_is_a_probe_of_exchanged_targets(causal, inputs):
    target = noise(N, 6, 2) + inputs[..., None]
    found = probe.linear(causal, inputs, target, "resid_post.0", test=HELD_OUT, seed=4, draws=20)
    train, test = fit_and_held_out(seed=4)
    activation = cache(causal, inputs, "resid_post.0")["resid_post.0"]
    (read,) = parse_targets(target, "regression", Prompts(inputs))
    seeds = np.random.SeedSequence([4, 3]).generate_state(1, np.uint64) >> 1
    order = read.shuffled([train, test], int(seeds[0])).order
    for group in (train, test):
        assert sorted(order[group].tolist()) == group.tolist(), "nothing crosses between fit and held out"
        assert not bool((order[group] == group).any()), "nobody keeps its own"
    oracle = LinearRegression(fit_intercept=False).fit(flat(activation, train), flat(target[order], train))
    error = mean_squared_error(flat(target[order], test), oracle.predict(flat(activation, test)))
    row = found.frame[found.frame["metric"] == "mse"].iloc[0]
    assert row["shuffled"] == pytest.approx(error, rel=1e-8)
    assert row["selectivity"] == pytest.approx(row["value"] - error, rel=1e-8)


def test_the_untrained_control_is_the_same_probe_on_that_model(causal, make_model, family, inputs):
    other = make_model(seed=9, family=family)
    target = noise(N, 6, 2) + inputs[..., None]
    found = probe.linear(causal, inputs, target, untrained=other, ridge=0.1, draws=20).frame
    alone = probe.linear(other, inputs, target, ridge=0.1, draws=20).frame
    assert found["untrained"].tolist() == pytest.approx(alone["value"].tolist(), rel=1e-12)
    assert (found["over_untrained"] == found["value"] - found["untrained"]).all()
    assert (found["untrained"] != found["value"]).all()
    none = probe.linear(causal, inputs, target, draws=20).frame
    assert none[["untrained", "over_untrained", "over_untrained_ci_high"]].isna().all().all()
    same = probe.linear(causal, inputs, target, untrained=causal, draws=20).frame
    assert (same[["over_untrained", "over_untrained_ci_low", "over_untrained_ci_high"]] == 0).all().all()


def test_intervals_are_bootstrap_over_held_out_examples_and_differences_are_paired(causal, inputs):
    target = noise(N, 6) + inputs
    found = probe.linear(causal, inputs, target, "resid_post.0", test=HELD_OUT, seed=2, draws=400)
    _, test = fit_and_held_out(seed=2)
    p = found.weights["resid_post.0", "target"].predict(
        cache(causal, inputs, "resid_post.0")["resid_post.0"]
    )[test]
    error = (p[..., 0] - target[test]).square().mean(1).numpy()
    weights = np.random.default_rng([2, 1]).multinomial(HELD_OUT, np.full(HELD_OUT, 1 / HELD_OUT), size=400)
    row = found.frame[found.frame["metric"] == "mse"].iloc[0]
    bounds = np.quantile(weights @ error / HELD_OUT, [0.025, 0.975])
    assert (row["value_ci_low"], row["value_ci_high"]) == pytest.approx(tuple(bounds), rel=1e-9)
    assert row["value_ci_low"] < row["value"] < row["value_ci_high"]
    assert (row["n"], row["fit_n"]) == (HELD_OUT, N - HELD_OUT)


@pytest.mark.parametrize("intercept", [False, True])
def test_directions_are_those_of_rows_of_norm_one_about_their_least_squares_centre(intercept):
    """Rows of all sizes, one of zeros, and a feature of zeros: singular values by hand part the ranks."""
    x = (noise(40, 6) + 1) * torch.logspace(-3, 3, 40, dtype=torch.float64)[:, None] + noise(6, seed=1)
    x[7], x[:, 2] = 0, 0
    weights = torch.nan_to_num(1 / x.norm(dim=1, keepdim=True), posinf=0).numpy()
    centre = np.linalg.lstsq(weights, weights * x.numpy(), rcond=None)[0] * intercept
    scale = np.linalg.norm(weights * x.numpy(), axis=0)
    singular = np.linalg.svd(weights * (x.numpy() - centre) / np.where(scale > 0, scale, 1), compute_uv=False)
    for number, value in enumerate(singular[:5]):
        ranks = [Regression(x, intercept, value * factor).rank for factor in (1.0001, 0.9999)]
        assert ranks == [number, number + 1]


def test_masked_scores_of_a_hugging_face_model_are_refused(hf_model):
    made = prompts(hf_model("bert"), [[3, 4, 5, 6], [7, 8]] * 3)
    with pytest.raises(CircuitsError, match="masked scores are not"):
        probe.linear(hf_model("bert"), made, torch.arange(6.0), "scores.0")
