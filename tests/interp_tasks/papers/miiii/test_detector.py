"""``detector``: against trial division, on models whose remainders are known, and on the shipped one."""

import numpy as np
import pytest
import torch

import tasks
from interp_tasks import save_checkpoint
from interp_tasks.experiments import COLUMNS, detector
from interp_tasks.papers.miiii.primality_by_remainders import precision_recall_rows
from tasks.modular_arithmetic import is_prime, primes_below

P = 11
MODULI = np.array(primes_below(P))


def table(n, said):
    return {row["metric"]: row for row in precision_recall_rows(n, said, MODULI, 0)}


def test_right_remainders_find_one_and_the_primes_from_p_on():
    n = np.arange(P**2)
    found = table(n, n[:, None] % MODULI)
    rough = [m for m in n if m == 1 or (is_prime(int(m)) and m >= P)]
    primes = [m for m in n if is_prime(int(m))]
    assert len(primes) == 30
    assert found["precision for rough numbers"]["value"] == found["recall for rough numbers"]["value"] == 1
    # Of what is called prime only 1 is none; of the primes those that are moduli are missed.
    assert found["precision for primes"]["value"] == pytest.approx((len(rough) - 1) / len(rough))
    assert found["recall for primes"]["value"] == pytest.approx((30 - len(MODULI)) / 30)
    assert found["right in all remainders"]["value"] == 1
    assert all(row["effect"] == 0 for row in found.values())


def test_wrong_remainders_by_hand():
    """11, 13 are prime; 15 = 3 · 5 and 7 are not called so by right remainders. 7 is called so here, 13 is not."""
    n = np.array([11, 13, 15, 7])
    said = n[:, None] % MODULI
    said[1, 0] = 0
    said[3, 3] = 1
    found = table(n, said)
    assert found["precision for rough numbers"]["value"] == 0.5
    assert found["recall for rough numbers"]["value"] == 0.5
    assert found["precision for primes"]["value"] == 1
    assert found["recall for primes"]["value"] == pytest.approx(2 / 3)
    assert found["recall for primes"]["baseline"] == pytest.approx(2 / 3)
    assert found["right in all remainders"]["value"] == 0.5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model that says, whatever the input, remainder 1 modulo 2 and 3, and 0 modulo 5."""
    task = tasks.get("miiii", p=P, primes=[2, 3, 5], digits="high-first")
    model = task.build_model(0, task.Model(d_model=8, n_heads=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.unembed.b_U[[1, 3, 5]] = 1.0
    return task, str(save_checkpoint(tmp_path_factory.mktemp("c") / "c", model, task, step=1))


def test_every_split_of_a_checkpoint(checkpoint):
    task, folder = checkpoint
    found = detector(folder).frame
    assert tuple(found.columns) == COLUMNS
    assert list(found["variant"].unique()) == ["all", "train", "validation", "test"]
    for split in ("train", "validation", "test"):
        batch = task.sample(None, split=split)
        # The high digit comes first here.
        n = batch.tokens[:, 0] * P + batch.tokens[:, 1]
        assert torch.equal(task.numbers(batch.extras["operands"]), n)
        mine = found[found["variant"] == split].set_index("metric")
        right = sum(m % 2 == 1 and m % 3 == 1 and m % 5 == 0 for m in n.tolist()) / len(n)
        assert mine.loc["right in all remainders", "value"] == pytest.approx(right)
        assert set(mine["n"]) == {len(n)}
        assert set(mine["split"]) == {split}
    recalls = found[found["metric"] == "recall for rough numbers"]
    assert (recalls["value"] == 0).all()
    assert (recalls["effect"] == -1).all()


def test_intervals_are_those_of_a_bootstrap_over_numbers():
    """Against ``circuits``' own, which draws number by number; both quantiles to their Monte-Carlo error."""
    from circuits.statistics import bootstrap_ratios
    from interp_tasks.papers.miiii.primality_by_remainders import resampled_ratios

    draws = np.random.default_rng(0).random((2, 200))
    counts = (draws < 0.5).astype(float)
    sums = counts * (np.random.default_rng(1).random((2, 200)) < 0.7)
    ours, theirs = resampled_ratios(sums, counts, 0), bootstrap_ratios(sums, counts, 0, 4000)
    assert ours.mean(0) == pytest.approx(theirs.mean(0), abs=0.005)
    assert ours.std(0) == pytest.approx(theirs.std(0), rel=0.08)
    assert np.corrcoef(ours.T)[0, 1] == pytest.approx(np.corrcoef(theirs.T)[0, 1], abs=0.08)
