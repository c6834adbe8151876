"""Spectra of checkpoints against numpy's FFT, over the grid of inputs."""

import math

import numpy as np
import pytest
import torch

import tasks
from circuits import cache, fourier
from interp_tasks import experiments
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS
from interp_tasks.measurement.option_parsing import THRESHOLD

P = 11
#: Neurons that follow frequency 2, and 4; the others follow 2 and 4 alike.
FOLLOW_2, FOLLOW_4 = range(8), range(8, 12)


@pytest.fixture(scope="module")
def addition():
    return tasks.get("modular-addition", p=P)


@pytest.fixture(scope="module")
def periodic(addition, tmp_path_factory):
    """A checkpoint whose embeddings hold frequencies 2 and 4, and whose neurons follow one of them, or both."""
    model = addition.build_model(0, addition.Model(d_model=16, n_heads=1, d_mlp=20))
    x = torch.arange(P)[:, None] * 2 * math.pi / P
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        # 2 with twice the amplitude of 4; and a constant, which is no frequency.
        model.W_E[:P, :4] = torch.cat([2 * (2 * x).cos(), 2 * (2 * x).sin(), (4 * x).cos(), (4 * x).sin()], 1)
        model.W_E[:P, 4] = 7
        # Uniform attention brings the operands' embeddings to "=".
        weights = {name.split(".")[-1]: weight for name, weight in model.named_parameters()}
        weights["W_V"][0, :4, :4] = weights["W_O"][0, :4, :4] = torch.eye(4)
        for neurons, rows in ((FOLLOW_2, [0, 1]), (FOLLOW_4, [2, 3]), (range(12, 20), [0, 2])):
            drawn = torch.randn(2, len(neurons), generator=torch.Generator().manual_seed(len(neurons)))
            for row, values in zip(rows, drawn, strict=True):
                weights["W_in"][row, list(neurons)] = values.abs() + 0.5
        weights["b_in"][:] = 0.2
    return model, str(save_checkpoint(tmp_path_factory.mktemp("periodic") / "c", model, addition, step=3))


def shares_by_fft(values):
    """Of [p, p, neuron], the share of the variance in each block {0, ±k}², and of each neuron; k = 1, 2, ..."""
    power = np.abs(np.fft.fft2(values, axes=(0, 1))) ** 2
    power[0, 0] = 0
    blocks = []
    for k in range(1, len(values) // 2 + 1):
        at = np.ix_([0, k, -k], [0, k, -k])
        blocks.append(power[at].sum((0, 1)))
    blocks = np.array(blocks)
    return blocks.sum(1) / power.sum(), blocks / power.sum((0, 1))


def value(frame, variant, metric, site):
    (found,) = frame.loc[
        (frame["variant"] == variant) & (frame["metric"] == metric) & (frame["site"] == site), "value"
    ]
    return found


def test_a_grid_of_inputs_against_numpy(addition, periodic):
    model, folder = periodic
    result = experiments.fourier(folder)
    frame = result.frame
    assert tuple(frame.columns) == COLUMNS
    grid = addition.input_grid()
    post = cache(model, grid.tokens, "mlp_post.0")["mlp_post.0"][:, -1].reshape(P, P, -1).double().numpy()
    whole, each = shares_by_fft(post)
    followers = each.argmax(0)[each.max(0) > THRESHOLD] + 1
    for k in range(1, 6):
        name = f"frequency {k}"
        assert value(frame, name, "share of variance", "embed") == pytest.approx(
            {2: 0.8, 4: 0.2}.get(k, 0), abs=1e-6
        )
        assert value(frame, name, "share of variance", "mlp_post") == pytest.approx(whole[k - 1], abs=1e-9)
        assert value(frame, name, "neurons", "mlp_post") == (followers == k).sum()
    rest = value(frame, "other frequencies", "share of variance", "mlp_post")
    assert rest == pytest.approx(1 - whole.sum(), abs=1e-9)
    assert rest > 0.01, "neurons that mix frequencies"
    assert value(frame, "no frequency", "neurons", "mlp_post") == post.shape[2] - len(followers)
    assert (followers == 2).sum() >= len(FOLLOW_2) - 2
    # Over one coordinate all frequencies are listed: nothing is left.
    assert "other frequencies" not in set(frame.loc[frame["site"] == "embed", "variant"])
    assert set(frame["n"]) == {P * P}
    assert set(frame["split"]) == {"grid"}
    assert set(frame.loc[frame["site"] == "mlp_post", "position"]) == {2}
    assert not frame.duplicated(["variant", "metric", "site", "layer"]).any()


def test_rows_are_key_frequencies_and_those_with_neurons_unless_there_are_few(periodic, addition, tmp_path):
    _, folder = periodic
    result = experiments.fourier(folder, rule="of-largest")
    (done,) = result.config["done"]
    assert done["interventions"]["W_E"]["key frequencies"] == [2, 4]
    assert done["interventions"]["mlp_post.0"]["grid"] == {"a": P, "b": P}
    frame = result.frame
    kinds = dict(zip(frame["variant"] + frame["site"], frame["intervention"], strict=True))
    assert kinds["frequency 2embed"] == "key frequency of W_E"
    assert kinds["frequency 3embed"] == "frequency of W_E"
    assert value(frame, "all frequencies", "key frequencies", "embed") == 2
    assert result.data["spectra"][folder, "W_E"].keys == (2, 4)
    # p = 37 has 18 frequencies, more than are all listed.
    task = tasks.get("modular-addition", p=37)
    model = task.build_model(0, task.Model(d_model=16, n_heads=1, d_mlp=20))
    other = str(save_checkpoint(tmp_path / "c", model, task))
    listed = experiments.fourier(other, rule="of-largest=0.999").frame
    variants = set(listed.loc[listed["site"] == "embed", "variant"])
    assert len(variants) == 3
    (left,) = listed.loc[(listed["site"] == "embed") & (listed["variant"] == "other frequencies"), "value"]
    shares = fourier.spectrum(model.W_E[:37]).bands().total().share
    assert left == pytest.approx(1 - float(shares.max()), abs=1e-9)


def test_in_several_passes_as_in_one(periodic, monkeypatch):
    one = experiments.fourier(periodic[1]).frame
    monkeypatch.setattr("interp_tasks.measurement.activations_in_passes.TOKENS_PER_PASS", 50)
    np.testing.assert_allclose(
        experiments.fourier(periodic[1]).frame["value"], one["value"], rtol=1e-5, atol=1e-9
    )
