"""Neurons and attention over the inputs, against plain numpy; the published count of active frequencies; refusals."""

import math

import numpy as np
import pytest
import torch

import tasks
from circuits import cache
from interp_tasks import experiments
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS
from interp_tasks.papers.miiii.active_frequencies import count_active_by_published_rule, published_amplitudes
from tests.interp_tasks.rows import row_of

P = 11


@pytest.fixture(scope="module")
def addition():
    return tasks.get("modular-addition", p=P)


@pytest.fixture(scope="module")
def model(addition):
    """Neurons 0 to 5 follow frequency 2, 6 to 9 frequency 4, 10 both, and 11 is always off."""
    model = addition.build_model(0, addition.Model(d_model=16, n_heads=2, d_mlp=12, init_std=0.3))
    x = torch.arange(P)[:, None] * 2 * math.pi / P
    weights = {name.split(".")[-1]: weight for name, weight in model.named_parameters()}
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in ("W_V", "W_O", "W_in", "W_pos"):
            weights[name].zero_()
        model.W_E[:P, :4] = torch.cat([(2 * x).cos(), (2 * x).sin(), (4 * x).cos(), (4 * x).sin()], 1)
        for head in range(2):
            weights["W_V"][head, :4, :4] = weights["W_O"][head, :4, :4] = torch.eye(4)
        for rows, neurons in (([0, 1], range(6)), ([2, 3], range(6, 10)), ([0, 2], [10])):
            for row in rows:
                weights["W_in"][row, list(neurons)] = torch.randn(len(neurons), generator=stream)
        weights["b_in"][:] = 0.1
        weights["b_in"][11] = -1
    return model


@pytest.fixture(scope="module")
def folder(model, addition, tmp_path_factory):
    return str(save_checkpoint(tmp_path_factory.mktemp("neurons") / "c", model, addition, step=3))


@pytest.fixture(scope="module")
def run(model, addition, tmp_path_factory):
    """A run's checkpoints: the same neurons, three sizes; then without those of frequency 4."""
    root = tmp_path_factory.mktemp("run") / "run"
    kept = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    out = next(name for name in kept if name.endswith("W_in"))
    for step, size in ((0, 0.1), (10, 1.0), (20, 2.0)):
        with torch.no_grad():
            dict(model.named_parameters())[out][:] = size * kept[out]
        save_checkpoint(root / "checkpoints" / f"{step:08d}", model, addition, step=step)
    with torch.no_grad():
        dict(model.named_parameters())[out][:] = kept[out]
    return str(root)


def of(result, variant, metric, column="value", **where):
    return row_of(result.frame, variant=variant, metric=metric, **where)[column]


def activations(model, task, site):
    seen = cache(model, task.input_grid().tokens, site)[site]
    return seen.double().numpy()


def powers(image):
    """Of [p, p]: |FFT|² without the constant."""
    found = np.abs(np.fft.fft2(image)) ** 2
    found[0, 0] = 0
    return found


def block(power, k):
    degree_1 = power[[k, -k], 0].sum() + power[0, [k, -k]].sum()
    return degree_1, degree_1 + power[np.ix_([k, -k], [k, -k])].sum()


def test_a_neuron_against_numpy(folder, model, addition):
    result = experiments.neurons(folder, neurons=[0, 7, 10])
    assert tuple(result.frame.columns) == COLUMNS
    post = activations(model, addition, "mlp_post.0")[:, -1].reshape(P, P, -1)
    for neuron, k in ((0, 2), (7, 4)):
        image, name = post[..., neuron], f"neuron {neuron}"
        power = powers(image)
        first, second = block(power, k)
        assert of(result, name, "mean") == pytest.approx(image.mean(), rel=1e-6)
        assert of(result, name, "frequency") == k
        assert of(result, name, "variance explained, degree 1") == pytest.approx(first / power.sum())
        assert of(result, name, "variance explained, degree 2") == pytest.approx(second / power.sum())
        by_a = image.mean(1).var() / image.var()
        by_b = image.mean(0).var() / image.var()
        assert of(result, name, "variance by one digit") == pytest.approx(max(by_a, by_b))
    drawn = result.data["images"][folder]["neuron 7 of mlp_post.0"]
    np.testing.assert_allclose(drawn.values, post[..., 7], rtol=1e-6)
    assert drawn.axes == ("a", "b")
    assert drawn.share.sum() == pytest.approx(1)
    assert set(result.frame["split"]) == {"grid"}
    assert set(result.frame["n"]) == {P * P}


def test_clusters_and_all_neurons_against_numpy(folder, model, addition):
    result = experiments.neurons(folder)
    post = activations(model, addition, "mlp_post.0")[:, -1].reshape(P, P, -1)
    explained = np.zeros((5, 12))
    variance = post.reshape(P * P, -1).var(0)
    for neuron in range(12):
        power = powers(post[..., neuron])
        if power.sum() > 1e-12:
            explained[:, neuron] = [block(power, k)[1] / power.sum() for k in range(1, 6)]
    inside = explained.max(0) > 0.85
    for k in (2, 4):
        assert (inside & (explained.argmax(0) == k - 1)).any()
    pooled = (explained.max(0) * variance)[inside].sum() / variance[inside].sum()
    assert of(result, "in clusters", "variance explained, degree 2") == pytest.approx(pooled)
    assert of(result, "in clusters", "clusters") == len(set(explained.argmax(0)[inside]))
    assert of(result, "in clusters", "share of neurons in clusters") == pytest.approx(inside.mean())
    varying = variance > 1e-12
    assert of(result, "all neurons", "neurons") == varying.sum() < 12
    pooled = (explained.max(0) * variance).sum() / variance.sum()
    assert of(result, "all neurons", "variance explained, degree 2") == pytest.approx(pooled)


def test_attention_against_numpy(folder, model, addition):
    result = experiments.neurons(folder, site="pattern")
    seen = activations(model, addition, "pattern.0")[:, :, 2]
    assert set(result.frame["variant"]) == {"0.0", "0.1", *(f"0.{h} to {d}" for h in (0, 1) for d in "ab")}
    for head in (0, 1):
        means = seen[:, head, :2].mean(0)
        assert of(result, f"0.{head}", "share of attention to one digit") == pytest.approx(
            means.max() / means.sum(), rel=1e-6
        )
        for key, name in enumerate("ab"):
            image = seen[:, head, key].reshape(P, P)
            one = max(image.mean(axis).var() / image.var() for axis in (0, 1))
            assert of(result, f"0.{head} to {name}", "mean") == pytest.approx(image.mean(), rel=1e-6)
            assert of(result, f"0.{head} to {name}", "variance by one digit") == pytest.approx(one, rel=1e-4)
            assert of(result, f"0.{head} to {name}", "variance by one digit", "head") == head
    assert set(result.data["images"][folder]) == {f"0.{h} to {d} of pattern.0" for h in (0, 1) for d in "ab"}


def test_amplitudes_are_of_the_grid_without_its_first_row_and_column():
    values = torch.randn(7, 7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = np.abs(np.fft.fft2(values.numpy()[1:, 1:], axes=(0, 1)))
    np.testing.assert_allclose(published_amplitudes(values), whole[:, :4].mean(0), rtol=1e-12)


def test_the_published_count_by_hand():
    over_time = np.array([[1.0, 2, 1], [1, 2, 1], [6, 2, 1]])[..., None]
    # Each frequency over its sum: the first 1/8, 1/8, 6/8, the others 1/3.
    flat = np.array([1 / 8, 1 / 8, 6 / 8] + 6 * [1 / 3])
    assert flat.mean() + flat.std() < 6 / 8 < flat.mean() + 3 * flat.std()
    assert count_active_by_published_rule(over_time, 1)[:, 0].tolist() == [0, 0, 1]
    assert count_active_by_published_rule(over_time, 3)[:, 0].tolist() == [0, 0, 0]
    assert count_active_by_published_rule(np.zeros((3, 3, 1)), 1).sum() == 0


def test_over_the_checkpoints_of_a_run(run, model, addition):
    result = experiments.neurons(f"{run}@all", [7])
    refs = list(dict.fromkeys(result.frame["ref"]))
    assert len(refs) == 3
    name = "active frequencies, mean + 1 sd"
    counts = [of(result, "neuron 7", name, ref=ref) for ref in refs]
    assert counts[0] == 0 < counts[2], "it grows"
    assert of(result, "neuron 7", f"{name}, step of the peak") == 10 * np.argmax(counts)
    assert of(result, "neuron 7", f"{name}, end / peak") == counts[2] / max(counts)
    every = [of(result, "all neurons", name, ref=ref) for ref in refs]
    assert every[0] == 0 < every[2] < 6
    # Two checkpoints are no training.
    two = experiments.neurons([f"{run}@0", f"{run}@10"], [7])
    assert not two.frame["metric"].str.contains("mean [+]").any()


def test_a_model_of_which_nothing_varies(addition, tmp_path):
    model = addition.build_model(0, addition.Model(d_model=8, n_heads=1, d_mlp=4))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    result = experiments.neurons(str(save_checkpoint(tmp_path / "c", model, addition)))
    assert of(result, "all neurons", "neurons") == 0
    assert of(result, "in clusters", "clusters") == 0
    assert result.page().html()
