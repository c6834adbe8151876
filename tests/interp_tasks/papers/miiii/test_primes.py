"""What belongs to each prime, on a model built with a circuit for each prime, or with one for both."""

import math

import numpy as np
import pandas
import pytest
import torch

import tasks
from circuits import cache
from interp_tasks import experiments
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS
from interp_tasks.papers.input_grid_and_answers import GridInputs
from interp_tasks.papers.miiii.parts_by_prime import lost_accuracy
from tests.interp_tasks.rows import row_of

P, NEURONS = 31, 120
#: Of the model with two circuits, the neurons of 3; those of 5 are the rest.
OF_3 = range(40)


@pytest.fixture(scope="module")
def task():
    return tasks.get("miiii", p=P, primes=(3, 5), train_fraction=0.5)


def waves(x, q):
    """cos, sin(2πjx/q) of the digits, [digit wave]."""
    angles = 2 * math.pi / q * x[:, None] * torch.arange(1, q // 2 + 1)
    return torch.cat([angles.cos(), angles.sin()], 1)


def built(task, shared):
    """Heads bring each digit's waves to "=", random neurons mix those of a prime (``shared``: of both), the read-out is
    fitted.
    """
    model = task.build_model(0, task.Model(d_model=29, n_heads=2, d_head=6, d_mlp=NEURONS, biases="trained"))
    weights = {name.split(".")[-1]: weight for name, weight in model.named_parameters()}
    x = torch.arange(P)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.W_E[:P, :6] = torch.cat([waves(x, 3), waves(x, 5)], 1)
        weights["W_pos"][:, 6:9] = torch.eye(3)
        for head in (0, 1):
            weights["W_Q"][head, 8, 0] = 100
            weights["W_K"][head, 6 + head, 0] = 1
            weights["W_V"][head, :6] = torch.eye(6)
            weights["W_O"][head, :, 9 + 6 * head : 15 + 6 * head] = torch.eye(6)
        drawn = torch.randn(12, NEURONS, generator=generator)
        if not shared:
            rows_of_3 = torch.tensor([0, 1, 6, 7])
            mine = torch.zeros(12, NEURONS)
            mine[rows_of_3, : len(OF_3)] = 1
            rows_of_5 = torch.tensor([at for at in range(12) if at not in rows_of_3])
            mine[rows_of_5[:, None], torch.arange(len(OF_3), NEURONS)] = 1
            drawn = drawn * mine
        weights["W_in"][9:21] = drawn
        weights["b_in"][:] = 0.3 * torch.randn(NEURONS, generator=generator)
        grid = task.input_grid()
        post = cache(model, grid.tokens, "mlp_post")["mlp_post.0"][:, -1].double()
        target = torch.cat(
            [torch.nn.functional.one_hot(grid.targets[:, at], q) for at, q in enumerate(task.moduli)], 1
        )
        fitted = torch.linalg.lstsq(post, 10 * target.double(), driver="gelsd", rcond=1e-6).solution
        weights["W_out"][:, 21:] = fitted.float()
        weights["W_U"][21:] = torch.eye(8)
    return model


@pytest.fixture(scope="module")
def found(task, tmp_path_factory):
    """Results of the model with two circuits, and of the model with one."""
    results = {}
    for name, shared in (("apart", False), ("shared", True)):
        model = built(task, shared)
        folder = tmp_path_factory.mktemp(name) / "c"
        ref = str(save_checkpoint(folder, model, task, step=1))
        results[name] = ref, model, experiments.primes(ref, draws=4)
    return results


def value(frame, variant, metric, intervention, column="value"):
    return row_of(frame, variant=variant, metric=metric, intervention=intervention)[column]


def r_squared(columns, values):
    """Of least squares with an intercept, all features together."""
    values = values - values.mean(0)
    columns = np.concatenate([np.ones((len(columns), 1)), columns], 1)
    rest = values - columns @ np.linalg.lstsq(columns, values, rcond=1e-10)[0]
    return 1 - (rest**2).sum() / (values**2).sum()


def test_shares_are_those_of_least_squares_on_waves(task, found):
    _, model, result = found["shared"]
    frame = result.frame
    assert list(frame.columns) == list(COLUMNS)
    grid = task.input_grid().tokens
    post = cache(model, grid, "mlp_post")["mlp_post.0"][:, -1].double().numpy()
    x0, x1 = grid[:, 0], grid[:, 1]
    for q in (3, 5):
        share = value(frame, f"mod_{q}", "share of variance", "answer: mlp_post.0")
        assert share == pytest.approx(r_squared(waves(x0 + P * x1, q).numpy(), post), abs=1e-6)
        embedding = model.W_E[:P].detach().double().numpy()
        share = value(frame, f"mod_{q}", "share of variance", "digit: W_E")
        assert share == pytest.approx(r_squared(waves(torch.arange(P), q).numpy(), embedding), abs=1e-6)
    both = np.concatenate([waves(torch.arange(P), q).numpy() for q in (3, 5)], 1)
    together = value(frame, "all answers", "share of variance", "digit: W_E")
    assert together == pytest.approx(r_squared(both, embedding), abs=1e-6)
    less = value(frame, "all answers", "share less chance", "digit: W_E")
    assert less == pytest.approx(1 - (1 - together) * (P - 1) / (P - 7), abs=1e-6)


def test_neurons_of_separate_circuits_serve_one_prime_each(found):
    frame = found["apart"][2].frame
    assert value(frame, "all answers", "neurons serving several", "neurons: mlp_post.0") == 0
    assert value(frame, "all answers", "answers per neuron", "neurons: mlp_post.0") < 1.2
    most = {q: value(frame, f"mod_{q}", "neurons serving it most", "neurons: mlp_post.0") for q in (3, 5)}
    assert 10 < most[3] <= len(OF_3)
    assert 20 < most[5] <= NEURONS - len(OF_3)
    mixed = found["shared"][2].frame
    several = value(mixed, "all answers", "neurons serving several", "neurons: mlp_post.0")
    assert several > 0
    assert value(mixed, "all answers", "answers per neuron", "neurons: mlp_post.0") > 1.2


@pytest.mark.parametrize("kind", ["digits at embed", "neurons at mlp_post.0"])
def test_without_a_circuit_of_its_own_only_its_prime_is_lost(found, kind):
    frame = found["apart"][2].frame
    own = value(frame, "all answers", "damage to itself", kind)
    others = value(frame, "all answers", "damage to the others", kind)
    assert own > 0.5
    assert others < 0.05


def test_damage_is_the_share_of_what_is_above_chance():
    task = tasks.get("miiii", p=11, primes=(2, 5, 7))
    answers = GridInputs.of(task, "primes").answers
    clean, without = [1.0, 0.9, 0.15], [[0.5, 0.9, 0.1], [1.0, 0.55, 0.1], [0.75, 0.9, 0.1]]
    rows = [
        {
            "variant": f"{prefix}mod_{gone}",
            "metric": f"mod_{judged}",
            "value": left[i][j],
            "baseline": clean[j],
        }
        for prefix, left in (("without ", without), ("control of ", [clean] * 3))
        for i, gone in enumerate((2, 5, 7))
        for j, judged in enumerate((2, 5, 7))
    ]
    own, others = lost_accuracy(pandas.DataFrame(rows), answers, "without ")
    # 7 is at chance before: nothing can be lost.
    np.testing.assert_allclose(own, [1, 0.5, np.nan])
    np.testing.assert_allclose(others, [0, 0, 0.25])
    assert np.nanmax(np.abs(lost_accuracy(pandas.DataFrame(rows), answers, "control of "))) == 0
