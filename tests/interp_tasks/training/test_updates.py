"""One update: Grokfast and the learning rate by formula, clipping, frozen tensors, the state that resumes it."""

import pytest
import torch

import tasks
from interp_tasks.training.config import TrainConfig, resolve_config
from interp_tasks.training.parameter_update import Updater, amplify_by_ema, amplify_by_ma


@pytest.fixture
def task():
    return tasks.get("modular-addition", p=5)


def small_model(task, **settings):
    return task.build_model(0, task.Model(d_model=8, n_heads=2, **settings))


def filtered(amplify, gradients, **config):
    """The gradients of one parameter as the filter leaves them, ``[steps, *shape]``."""
    memory, found = {}, [gradient.clone() for gradient in gradients]
    for gradient in found:
        amplify(memory, gradient, TrainConfig(**config))
    return torch.stack(found)


@pytest.mark.parametrize("start", ["zero", "first-gradient"])
def test_grokfast_is_its_recurrence(start):
    alpha, lamb = 0.9, 2.0
    gradients = [1.0, -0.5, 3.0, 0.25]
    config = {"grokfast_alpha": alpha, "grokfast_lambda": lamb, "grokfast_start": start}
    average, expected = 0.0 if start == "zero" else gradients[0], []
    for gradient in gradients:
        average = alpha * average + (1 - alpha) * gradient
        expected.append(gradient + lamb * average)
    assert filtered(amplify_by_ema, torch.tensor(gradients), **config).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("window", [1, 3, 7])
def test_grokfast_ma_is_the_mean_of_the_last_gradients(window):
    gradients = torch.randn(40, 2, 5, generator=torch.Generator().manual_seed(0))
    lamb = 5.0
    expected = gradients.double().clone()
    for step in range(window - 1, len(gradients)):
        expected[step] += lamb * gradients[step - window + 1 : step + 1].double().mean(0)
    found = filtered(amplify_by_ma, gradients, grokfast_window=window, grokfast_lambda=lamb)
    assert torch.equal(found[: window - 1], gradients[: window - 1])
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_huge_gradient_leaves_nothing_behind_in_the_moving_average():
    """1e12 takes away all digits below 1e-4 of a float64 sum; after one round of the queue they are back."""
    gradients = torch.full((30, 1), 1e-5)
    gradients[3] = 1e12
    found = filtered(amplify_by_ma, gradients, grokfast_window=4)
    torch.testing.assert_close(found[12:], torch.full((18, 1), 3e-5), rtol=1e-6, atol=0)


#: Rates of the first updates, in units of ``learning_rate``.
SCHEDULES = [
    ({"warmup_steps": 4}, [1 / 4, 2 / 4, 3 / 4, 1, 1, 1]),
    ({"schedule": "linear", "schedule_end": 4}, [1, 3 / 4, 2 / 4, 1 / 4, 0, 0]),
    (
        {"schedule": "linear", "schedule_start": 2, "schedule_end": 6, "schedule_floor": 0.2},
        [1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2],
    ),
    # The cosine of 0, 60, 90, 120 and 180 degrees.
    ({"schedule": "cosine", "schedule_end": 6}, [1, None, 3 / 4, 1 / 2, 1 / 4, None, 0, 0]),
    ({"schedule": "cosine", "schedule_end": 2, "schedule_floor": 0.5}, [1, 3 / 4, 1 / 2, 1 / 2]),
    # Both at once: the fall begins where the warm-up ends, or later.
    ({"warmup_steps": 2, "schedule": "linear", "schedule_end": 4}, [1 / 2, 1, 1, 1 / 2, 0]),
    (
        {"warmup_steps": 2, "schedule": "linear", "schedule_start": 3, "schedule_end": 5},
        [0.5, 1, 1, 1, 0.5, 0],
    ),
    ({"schedule": "linear", "schedule_end": 4, "schedule_floor": 1}, [1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("settings", "expected"), SCHEDULES)
def test_learning_rate_by_its_closed_form(task, settings, expected):
    """Before the fall exactly the full rate, after it exactly the floor, and the optimiser is given it."""
    config = TrainConfig(learning_rate=1e-2, **settings)
    rates = [config.learning_rate_at(step) for step in range(len(expected))]
    known = [(rate, share) for rate, share in zip(rates, expected, strict=True) if share is not None]
    assert [rate for rate, _ in known] == pytest.approx([1e-2 * share for _, share in known])
    assert all(rate == 1e-2 for rate, share in known if share == 1)
    assert [config.model_copy(update={"steps": 3}).learning_rate_at(step) for step in range(8)] == [
        config.model_copy(update={"steps": 10**9}).learning_rate_at(step) for step in range(8)
    ]
    updater = Updater(small_model(task), config)
    for step, rate in enumerate(rates):
        updater.set_learning_rate(step)
        assert [group["lr"] for group in updater.optimizer.param_groups] == [rate]


def gradients_seen_by(task, config, factor=1.0):
    model = small_model(task)
    updater = Updater(model, config)
    batch = task.sample(None, split="train")
    (factor * task.loss(model(batch.tokens), batch)).backward()
    seen = {}
    updater.optimizer.step = lambda: seen.update(
        {name: p.grad.clone() for name, p in updater.parameters.items()}
    )
    stages = []
    updater.update_parameters(lambda stage, gradients: stages.append((stage, dict(gradients))))
    return seen, stages, model


def norm(gradients):
    return sum(gradient.double().square().sum() for gradient in gradients.values()).sqrt().item()


def test_clipping_bounds_the_global_norm_and_leaves_small_gradients(task):
    free, _, _ = gradients_seen_by(task, TrainConfig())
    clipped, _, _ = gradients_seen_by(task, TrainConfig(clip_norm=norm(free) / 3))
    assert norm(clipped) == pytest.approx(norm(free) / 3, rel=1e-4)
    loose, _, _ = gradients_seen_by(task, TrainConfig(clip_norm=norm(free) * 3))
    assert all(torch.equal(loose[name], free[name]) for name in free)


@pytest.mark.parametrize(
    "settings", [{"grokfast": "ema"}, {"grokfast": "ma", "grokfast_window": 3}, {"grokfast": "ma"}]
)
def test_state_resumes_an_update_bit_for_bit(task, settings):
    config = TrainConfig(weight_decay=0.5, **settings)
    batch = task.sample(None, split="train")

    def advance(model, updater, steps):
        for step in steps:
            task.loss(model(batch.tokens), batch).backward()
            updater.set_learning_rate(step)
            updater.update_parameters()

    model = small_model(task)
    updater = Updater(model, config)
    advance(model, updater, range(5))
    other = small_model(task)
    other.load_state_dict(model.state_dict())
    resumed = Updater(other, config)
    resumed.load_resume_tensors({name: tensor.clone() for name, tensor in updater.resume_tensors().items()})
    advance(model, updater, range(5, 9))
    advance(other, resumed, range(5, 9))
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_checkpoint_steps_are_log_spaced_then_linear_with_the_published_ones():
    config = TrainConfig(steps=1100, checkpoint_every=250, checkpoint_at=(7, 5000))
    expected = [0, 1, 2, 4, 7, 8, 16, 32, 64, 128, 250, 333, 500, 750, 1000, 1100]
    assert config.checkpoint_steps(published=(333, 4000)) == expected
    assert TrainConfig(steps=0).checkpoint_steps() == [0]


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.betas", "0.9, 0.95", [0.9, 0.95]),
        ("train.betas", "[0.9, 0.95]", [0.9, 0.95]),
        ("train.checkpoint_at", "7", [7]),
        ("train.checkpoint_at", "", []),
        ("train.observe", "z.0,blocks.0.hook_resid_post", ["z.0", "blocks.0.hook_resid_post"]),
        ("train.observe", '["z.0"]', ["z.0"]),
        ("task.primes", "2, 3,5", [2, 3, 5]),
        ("task.primes", "none", None),
    ],
)
def test_lists_are_divided_by_commas_with_or_without_brackets(key, text, expected):
    resolved = resolve_config("miiii", "cpu", {key: text})
    section, _, name = key.partition(".")
    found = getattr(resolved.train, name) if section == "train" else resolved.task[name]
    assert (list(found) if isinstance(found, tuple) else found) == expected
