"""Matrix completion: the laws of its data, its tokens, its metrics and its models."""

from decimal import ROUND_HALF_EVEN, Decimal

import numpy
import pytest
import torch

import tasks
from tasks import TaskError, pool
from tasks.matrix_completion import MatrixCompletion, MatrixModelSettings
from tasks.matrix_completion.matrix_task_base import MASK_ID

SMALL = MatrixModelSettings(n_layers=1, n_heads=2, d_model=16, init_std=0.2)
GRIDS = [(10.0, 0.01), (1.2, 0.05), (1.2, 0.02), (2.0, 0.01), (0.3, 0.1), (3.0, 1.0), (1.5, 0.5)]


def matrices(task, n, seed=0):
    return task.sample(n, seed=seed).targets.view(n, task.n, task.columns).double()


@pytest.mark.parametrize(("n", "m", "rank"), [(4, 4, 1), (7, 7, 2), (3, 6, 3)])
@pytest.mark.parametrize(
    ("distribution", "scale", "factor_variance"),
    [
        ("uniform", 1.0, 1 / 3),
        ("uniform", 2.0, 4 / 3),
        ("gaussian", 0.5, 0.25),
        ("laplace", 0.25, 2 * 0.25**2),
    ],
)
def test_the_variance_of_an_entry_is_rank_times_the_factors_variance_squared(
    n, m, rank, distribution, scale, factor_variance, assert_mean
):
    """r/9 for uniform factors, r·scale⁴ Gaussian, 4·r·scale⁴ Laplace; rounding adds step²/12 = 8e-10."""
    task = MatrixCompletion(
        n=n, m=m, rank=rank, distribution=distribution, scale=scale, grid_max=60, grid_step=0.0001
    )
    drawn = matrices(task, 4000)
    assert_mean(drawn.square().mean((1, 2)), rank * factor_variance**2)
    assert_mean(drawn.mean((1, 2)), 0.0)


@pytest.mark.parametrize(
    ("distribution", "variance", "mean_size", "fourth_moment"),
    [
        ("uniform", 4 / 3, 1.0, 16 / 5),
        ("gaussian", 4.0, 2 * (2 / numpy.pi) ** 0.5, 48.0),
        ("laplace", 8.0, 2.0, 384.0),
    ],
)
def test_entries_drawn_directly_have_the_moments_of_their_distribution(
    distribution, variance, mean_size, fourth_moment, assert_mean
):
    """At scale 2: uniform s²/3 and s⁴/5, Gaussian s² and 3s⁴, Laplace 2s² and 24s⁴; E|X| s/2, s√(2/π), s."""
    task = MatrixCompletion(
        n=3, rank=1, law="entries", distribution=distribution, scale=2, grid_max=100, grid_step=0.001
    )
    drawn = matrices(task, 20000).flatten()
    assert_mean(drawn.square(), variance)
    assert_mean(drawn.abs(), mean_size)
    assert_mean(drawn**4, fourth_moment)


@pytest.mark.parametrize(("n", "m", "rank"), [(7, 7, 2), (4, 4, 1), (5, 8, 3)])
def test_factor_matrices_have_exactly_the_rank_asked_for(n, m, rank):
    """Rounding moves an entry by at most step/2, so (Weyl) singular value r + 1 is at most √(n·m)·step/2."""
    step = 1e-5
    singular = torch.linalg.svdvals(matrices(MatrixCompletion(n=n, m=m, rank=rank, grid_step=step), 200))
    most = (n * m) ** 0.5 * step / 2 + 1e-6
    assert singular[:, rank].max() <= most
    assert singular[:, rank - 1].median() > 1000 * most


def test_each_entry_is_hidden_on_its_own_with_the_rate_asked_for(assert_mean):
    task = MatrixCompletion(n=4, rank=1)
    hidden = task.sample(60000).extras["hidden"].double()
    for entry in hidden.T:
        assert_mean(entry, 0.3)
    first, second = torch.triu_indices(16, 16, 1)
    pairs = hidden[:, first] * hidden[:, second]
    for pair in pairs.T:
        assert_mean(pair, 0.09)
    # 0.7¹⁶ = 0.33%: about 200 of these masks hide nothing, and they must not be special.
    assert_mean((hidden.sum(1) == 0).double(), 0.7**16)
    assert round(0.7**16, 4) == 0.0033


def test_token_ids_of_the_published_grid():
    """Workshop paper and code: −10 → 1, 0 → 1001, 10 → 2001, MASK 0; 0.44 → 1045, −0.24 → 977."""
    task = MatrixCompletion()
    assert task.d_vocab == 2002
    values = torch.tensor([-10.0, 0.0, 10.0, 0.44, -0.24, -1.5, 1.5])
    assert task.encode(values).tolist() == [1, 1001, 2001, 1045, 977, 851, 1151]


@pytest.mark.parametrize(("grid_max", "grid_step"), GRIDS)
def test_every_id_survives_the_round_trip(grid_max, grid_step):
    task = MatrixCompletion(grid_max=grid_max, grid_step=grid_step)
    ids = torch.arange(1, task.d_vocab)
    assert torch.equal(task.encode(task.decode(ids)), ids)
    step = Decimal(str(grid_step))
    exact = [float(step * (i - len(ids) // 2)) for i in range(len(ids))]
    assert torch.equal(task.decode(ids), torch.tensor(exact))
    assert task.decode(ids)[0] == -torch.tensor(grid_max)
    assert task.decode(torch.tensor([MASK_ID])).isnan().all()


@pytest.mark.parametrize(("grid_max", "grid_step"), [(10.0, 0.01), (3.0, 1.0), (1.5, 0.5), (2.0, 0.25)])
def test_halves_round_to_even(grid_max, grid_step):
    """On eighths, which floats hold exactly, so that a half is a half."""
    task = MatrixCompletion(grid_max=grid_max, grid_step=grid_step)
    eighths = [i / 8 for i in range(-int(grid_max * 8), int(grid_max * 8) + 1)]
    step = Decimal(str(grid_step))
    expected = [int((Decimal(v) / step).to_integral_value(ROUND_HALF_EVEN)) for v in eighths]
    found = task.encode(torch.tensor(eighths)) - task.n_positive_values - 1
    assert found.tolist() == expected


def test_values_off_the_grid_are_clamped_or_refused_as_the_config_says():
    values = torch.tensor([[1.21, -1.22, 7.0, float("-inf"), 0.5]])
    clamping = MatrixCompletion(grid_max=1.2, grid_step=0.05)
    assert clamping.decode(clamping.encode(values)).tolist() == [
        [pytest.approx(v) for v in (1.2, -1.2, 1.2, -1.2, 0.5)]
    ]
    refusing = MatrixCompletion(grid_max=1.2, grid_step=0.05, off_grid="refuse")
    assert torch.equal(refusing.encode(values[:, [0, 1, 4]]), clamping.encode(values[:, [0, 1, 4]]))
    with pytest.raises(TaskError, match=r"^value -7 lies off the grid ±1.2: .*off_grid=clamp$"):
        refusing.encode(torch.tensor([0.0, -7.0, 2.0]))
    for task in (clamping, refusing):
        with pytest.raises(TaskError, match="NaN"):
            task.encode(torch.tensor([0.0, float("nan")]))
    with pytest.raises(TaskError, match="off the grid"):
        MatrixCompletion(distribution="gaussian", off_grid="refuse", grid_max=1.2, grid_step=0.05).sample(100)


def metrics_by_hand(output, batch):
    """One entry at a time, in float64."""
    out, targets, hidden = (x.numpy() for x in (output[..., 0], batch.targets, batch.extras["hidden"]))
    n, entries = targets.shape
    mean_all, masked, observed = numpy.zeros(n), numpy.zeros((n, 2)), numpy.zeros((n, 2))
    for i in range(n):
        for k in range(entries):
            square = (float(out[i, k]) - float(targets[i, k])) ** 2
            mean_all[i] += square / entries
            (masked if hidden[i, k] else observed)[i] += (square, 1)
    return {"mse_all": mean_all, "mse_masked": masked, "mse_observed": observed}


def test_metrics_against_a_loop_over_entries():
    task = MatrixCompletion(n=3, m=4, rank=2, p_mask=0.5)
    batch = task.sample(40)
    output = torch.randn(40, 12, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, expected = task.metrics(output, batch), metrics_by_hand(output, batch)
    numpy.testing.assert_allclose(found["mse_all"].numpy(), expected["mse_all"], rtol=1e-12)
    for name in ("mse_masked", "mse_observed"):
        total, count = found[name]
        numpy.testing.assert_allclose(total.numpy(), expected[name][:, 0], rtol=1e-12)
        assert count.tolist() == expected[name][:, 1].tolist()
    assert task.loss(output, batch).item() == pytest.approx(expected["mse_all"].mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("p_mask", "empty", "full"), [(0.0, "mse_masked", "mse_observed"), (1.0, "mse_observed", "mse_masked")]
)
def test_all_observed_and_all_hidden_count_nothing_and_make_no_nan(p_mask, empty, full):
    task = MatrixCompletion(n=3, rank=1, p_mask=p_mask)
    batch = task.sample(10)
    assert (batch.tokens == MASK_ID).all() if p_mask else (batch.tokens != MASK_ID).all()
    model = task.build_model(0, SMALL)
    output = model(batch.tokens)
    metrics = task.metrics(output, batch)
    assert metrics[empty][0].tolist() == metrics[empty][1].tolist() == [0] * 10
    pooled = pool(metrics)
    assert pooled[empty] is None
    assert pooled[full] == pytest.approx(pooled["mse_all"])
    (task.loss(output, batch) + metrics[empty][0].sum() + metrics[full][0].sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_the_published_model_has_the_published_sizes():
    """30,284,545 parameters, and LayerNorms after the embeddings and each sum, as BERT's."""
    preset = tasks.task_class("matrix-completion").presets["paper"]
    task = tasks.get("matrix-completion", **preset["task"])
    model = task.build_model(0, task.Model(**preset["model"]))
    assert model.embed.W_E.shape == (2002, 768)
    assert model.pos_embed.W_pos.shape == (512, 768)
    assert model.unembed.W_U.shape == (768, 1)
    assert model.blocks[0].attn.W_Q.shape == (8, 768, 96)
    assert sum(parameter.numel() for parameter in model.parameters()) == 30_284_545
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert hasattr(model, "ln_embed")
    assert not list(model.ln_final.parameters())
    assert {model.ln_embed.eps, *(block.ln2.eps for block in model.blocks)} == {1e-12}


OPTIMISERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("mask_embedding", ["zero", "learned"])
def test_the_mask_embedding_stays_zero_or_learns(mask_embedding, optimiser):
    task = MatrixCompletion(n=3, rank=1, grid_max=1.2, grid_step=0.05)
    model = task.build_model(0, SMALL.model_copy(update={"mask_embedding": mask_embedding}))
    embedding = model.embed.W_E
    before = embedding.detach().clone()
    assert (before[MASK_ID] == 0).all() == (mask_embedding == "zero")
    model.load_state_dict(model.state_dict())
    model.to("cpu")
    updates = OPTIMISERS[optimiser](model.parameters())
    for step in range(3):
        batch = task.sample(32, seed=step, split="train")
        assert (batch.tokens == MASK_ID).any()
        updates.zero_grad()
        task.loss(model(batch.tokens), batch).backward()
        assert (embedding.grad[MASK_ID] == 0).all() == (mask_embedding == "zero")
        updates.step()
    moved = (embedding != before).any(1)
    assert moved[MASK_ID] == (mask_embedding == "learned")
    assert moved[batch.tokens.unique()[1:]].all()
