"""``interp-run runs llc``: a coefficient that is known by hand, and the table over the checkpoints of a run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from interp_tasks.experiments import llc_experiment as module
from tasks import Batch
from tests.interp_tasks.rows import row_of

#: The coefficients of two chains at steps of a shipped run.
CHAINS = {250: (10.0, 12.0), 1000: (10.0, 12.0), 1500: (4.0, 4.0), 3000: (0.0, 2.0)}
TRACE = np.array([[9.0, 1.0, 2.0, 3.0], [9.0, 3.0, 4.0, 5.0]])


class Parabola(torch.nn.Module):
    """Half the square of its weights is its loss, whatever the input."""

    def __init__(self, d):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(d))

    def forward(self, tokens):
        return self.weights


def test_the_coefficient_of_a_parabola(monkeypatch):
    """Weights are Gaussian of precision nβ + γ around 0, so it is d/2 · nβ / (nβ + γ)."""
    pytest.importorskip("devinterp")
    monkeypatch.setattr("interp_tasks.training.fused_forward.fastest_forward", lambda it, *_: (it, None))
    d, n_beta, spring = 400, 300.0, 100.0
    task = SimpleNamespace(read_positions=(0,), loss=lambda output, batch: output.square().sum() / 2)
    batch = Batch(torch.zeros(8, 1, dtype=torch.long), torch.zeros(8))
    settings = {"lr": 2e-4, "localization": spring, "num_chains": 3, "num_draws": 300, "batch_size": 4}
    settings |= {"num_burnin_steps": 100, "n_beta": n_beta}
    before = torch.get_rng_state()
    found = module.estimate_llc(SimpleNamespace(task=task, batch=batch, model=Parabola(d), seed=0), settings)
    assert torch.equal(before, torch.get_rng_state())
    assert np.allclose(found["llc_per_chain"], d / 2 * n_beta / (n_beta + spring), rtol=0.05)
    assert found["loss_trace"].shape == (3, 400)


def test_rows_and_the_steps_of_half_of_the_way(monkeypatch):
    def sampled(subject, settings):
        values = {"llc_per_chain": CHAINS[subject.stored.step], "loss_trace": TRACE, "init_loss": 0.5}
        return {name: SimpleNamespace(values=np.array(value)) for name, value in values.items()}

    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(module, "estimate_llc", sampled)
    monkeypatch.setattr(module, "SAMPLES", 64)
    steps = list(CHAINS)
    result = module.llc(f"zoo:modular-addition-113@{','.join(map(str, steps))}", burn_in=1, draws=3)
    frame = result.frame
    assert row_of(frame[frame["draw"].isna()], step=1500, metric="coefficient")["value"] == 4
    assert list(frame[frame["step"].eq(250) & frame["draw"].notna()]["value"]) == [10, 12]
    # After the burn-in: variance within chains 1, of their means 2.
    assert row_of(frame, step=250, metric="R-hat")["value"] == pytest.approx((2 / 3 + 2) ** 0.5)
    half = frame[frame["metric"] == "step at 50%"]
    assert set(half["step"]) == {3000}
    accuracy = frame[frame["metric"] == "held-out accuracy"]["value"].to_numpy()
    middle = np.interp((accuracy[0] + accuracy[-1]) / 2, accuracy, steps)
    # Chains are half-way at 5 and 7, on the line from step 1000 to 1500.
    expected = np.mean([1000 + 500 * 5 / 6, 1000 + 500 * 5 / 8])
    row = row_of(half, variant="coefficient")
    assert (row["value"], row["baseline"]) == pytest.approx((expected, middle))
    assert row["effect"] == pytest.approx(expected - middle)
    drawn = np.concatenate([trace.y for one in result.figures() for trace in one.figure.data])
    assert {4.0, *TRACE.ravel()} <= set(drawn)
