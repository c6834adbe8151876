"""``interp-run modular weights``: against numpy's SVD, FFT and correlations, on tables by hand; what is refused."""

import numpy as np
import pytest
import torch

import tasks
from interp_tasks.checkpoints import load_checkpoint, save_checkpoint
from interp_tasks.errors import UserError
from interp_tasks.experiments import COLUMNS, weights
from interp_tasks.measurement.loaded_checkpoints import subjects
from interp_tasks.measurement.options_and_examples import Examples
from interp_tasks.measurement.untrained_models import build_untrained
from interp_tasks.papers.miiii.embedding_svd_and_frequencies import (
    MODELS,
    PUBLISHED_DIMENSIONS,
    are_periodic,
    periodic_share_threshold,
    significant_frequencies,
    true_and_shuffled_norms,
    vectors_for_share,
)
from tests.interp_tasks.rows import row_of

RNG = np.random.default_rng(0)
P, D = 23, 48


@pytest.mark.parametrize("rows", [P, 22])
def test_what_is_periodic_has_a_large_share_of_the_fft(rows):
    functions = RNG.normal(size=(rows, 6)) + 5
    functions[:, 0] = 3 * np.cos(2 * np.pi * 4 * np.arange(rows) / rows) + 1
    power = np.abs(np.fft.fft(functions, axis=0)) ** 2
    power[0] = 0
    each = np.array([power[list({k, rows - k})].sum(0) for k in range(1, rows // 2 + 1)])
    shares = each / power.sum(0)
    found = are_periodic(functions).tolist()
    assert found == (shares.max(0) > periodic_share_threshold(rows)).tolist()
    assert found[0]


def test_norms_beside_relabelled_digits_are_those_of_the_fft():
    table = RNG.normal(size=(P, D))
    table += 2 * np.cos(2 * np.pi * 3 * np.arange(P) / P)[:, None] * RNG.normal(size=D)
    norms, *others = true_and_shuffled_norms(table, 99, 0)
    whole = np.abs(np.fft.fft(table, axis=0)) ** 2
    expected = np.sqrt([2 * whole[k].sum() / P for k in range(1, P // 2 + 1)])
    assert norms == pytest.approx(expected)
    assert (significant_frequencies(table, 99, 0).nonzero()[0] + 1).tolist() == [3]
    # No order of the rows has more power than there is.
    assert np.max(others) < np.linalg.norm(table - table.mean(0))
    assert len({each.max() for each in others}) == 99


@pytest.fixture(scope="module")
def addition():
    return tasks.get("modular-addition", p=P)


@pytest.fixture(scope="module")
def made(addition, tmp_path_factory):
    """Embeddings of frequencies 2 and 5, position 1 that is position 0 turned round, all else small."""
    model = addition.build_model(3, addition.Model(d_model=D, n_heads=2))
    x = 2 * torch.pi * torch.arange(P)[:, None] / P
    with torch.no_grad():
        model.W_E.mul_(0.01)
        # '=' is no digit.
        model.W_E[P] = 100
        model.W_E[:P, :4] += torch.cat(
            [3 * (2 * x).cos(), 3 * (2 * x).sin(), 2.5 * (5 * x).cos(), 2.5 * (5 * x).sin()], 1
        )
        model.pos_embed.W_pos[1] = -model.pos_embed.W_pos[0] + 0.5
    return str(save_checkpoint(tmp_path_factory.mktemp("made") / "c", model, addition, step=3))


@pytest.fixture(scope="module")
def result(made):
    return weights(made)


def test_positions_against_numpy(made, result):
    frame = result.frame
    assert tuple(frame.columns) == COLUMNS
    assert set(frame["split"]) == {"weights"}
    table = load_checkpoint(made).model.W_pos.detach().double().numpy()
    for dimensions, about in ((D, "all dimensions"), (PUBLISHED_DIMENSIONS, "first 37 dimensions")):
        one, other = table[0, :dimensions], table[1, :dimensions]
        pearson = row_of(frame, intervention=about, metric="Pearson correlation")
        assert pearson["value"] == pytest.approx(np.corrcoef(one, other)[0, 1]) == pytest.approx(-1)
        cosine = row_of(frame, intervention=about, metric="cosine similarity")
        expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert cosine["value"] == pytest.approx(expected)
        assert cosine["value_ci_low"] < expected < cosine["value_ci_high"]
        assert cosine["n"] == dimensions


def test_singular_values_are_of_the_digits_alone(made, result):
    table = load_checkpoint(made).model.W_E.detach().double().numpy()[:P]
    sizes = np.linalg.svd(table)[1]
    found = result.frame
    grown = np.cumsum(sizes) / sizes.sum()
    for share in (0.5, 0.9):
        row = row_of(found, intervention="singular values", metric=f"vectors for {share:.0%} of S")
        assert row["value"] == np.argmax(grown >= share) + 1
    assert row_of(found, intervention="leading singular vectors", metric="periodic share")["value"] == 1


def test_untrained_models_stand_beside(made, result):
    """Mean and range of the same number of each of them."""
    (subject,) = subjects(made, Examples())
    models = [build_untrained(subject, draw) for draw in range(MODELS)]
    embeddings = [model.W_E.detach().double().numpy()[:P] for model in models]
    found = [vectors_for_share(np.linalg.svd(one)[1], 0.9) for one in embeddings]
    assert len({model.W_E[0, 0].item() for model in models}) == MODELS
    metric = "vectors for 90% of S"
    row = row_of(result.frame, intervention="singular values", metric=metric)
    assert row["baseline"] == pytest.approx(np.mean(found))
    assert row["effect"] == pytest.approx(row["value"] - np.mean(found))


def test_exponents_put_the_digits_of_multiplication_in_order(tmp_path):
    """A table that is periodic in the exponent, not in the digit; 0 and '=' have none."""
    task = tasks.get("modular-multiplication", p=P)
    model = task.build_model(0, task.Model(d_model=D, n_heads=2))
    digits = list(task.grid_axes()[0].values)
    exponents = 2 * torch.pi * 3 * torch.arange(P - 1)[:, None] / (P - 1)
    with torch.no_grad():
        model.W_E.mul_(0.01)
        model.W_E[digits, :2] += torch.cat([exponents.cos(), exponents.sin()], 1)
    frame = weights(str(save_checkpoint(tmp_path / "c", model, task, step=0))).frame
    row = row_of(frame, metric="frequencies above relabelled digits")
    assert (row["value"], row["n"]) == (1, P - 1)


def test_a_control_has_rows_of_its_own(made, addition, tmp_path):
    other = str(save_checkpoint(tmp_path / "c", addition.build_model(9), addition, step=0))
    frame = weights(made, other).frame
    spectrum = frame[frame["metric"] == "frequencies above relabelled digits"]
    assert list(spectrum["ref"]) == [made, other]
    assert spectrum["value"].iloc[0] >= 1
    with pytest.raises(UserError, match="is a checkpoint of --ckpt too"):
        weights(made, [other, made])
