"""Training with the attention of another model: the same function as an intervention, and what it leaves untrained."""

import pytest
import torch

import tasks
from circuits import cache, intervene, patch
from interp_tasks import UserError, load_checkpoint, save_checkpoint, train
from interp_tasks.checkpoints import read_run
from interp_tasks.training.teacher_attention import TeacherAttentionForward

SETTINGS = {"d_model": 8, "n_heads": 2, "n_layers": 3}
CONFIG = {"steps": 3, "batch_size": 8, "eval_samples": 8, "learning_rate": 0.01, "threads": 1}


def matrices():
    return tasks.get("matrix-completion", n=2, rank=1, grid_max=1, grid_step=0.1)


def addition():
    return tasks.get("modular-addition", p=7)


def models(task, **more):
    """A model and a teacher whose attention is far from uniform."""
    student, teacher = (
        task.build_model(seed, task.Model(**{**SETTINGS, "init_std": 0.5, **more})) for seed in (0, 1)
    )
    return student, teacher


@pytest.mark.parametrize("make", [matrices, addition])
@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_output_and_gradients_are_those_of_patched_patterns(make, layers):
    task = make()
    student, teacher = models(task)
    tokens = task.sample(6, seed=0).tokens
    expected_layers = layers or range(3)
    given = cache(teacher, tokens, ["pattern"])
    edits = [
        patch.activations(f"blocks.{layer}.attn.hook_pattern", source=given) for layer in expected_layers
    ]
    with intervene(student, *edits):
        expected = student(tokens)[:, task.read_positions]
    (expected**2).sum().backward()
    gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad(set_to_none=True)

    got = TeacherAttentionForward(student, task.read_positions, teacher, layers)(tokens)
    (got**2).sum().backward()

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    plain = student(tokens)[:, task.read_positions]
    assert (got - plain).abs().max() > 0.01 * plain.std()
    for name, parameter in student.named_parameters():
        there = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(there, gradients.get(name, torch.zeros_like(there)), atol=1e-4, rtol=1e-4)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_run_is_taught_and_says_by_whom(tmp_path):
    task = matrices()
    _, teacher = models(task)
    save_checkpoint(tmp_path / "teacher", teacher, task=task)
    settings = task.Model(**SETTINGS)
    config = {**CONFIG, "attention_from": str(tmp_path / "teacher"), "attention_layers": [0, 2]}
    run = train(task, out=tmp_path / "run", settings=settings, config=config)
    record = read_run(run)
    assert record["forward"]["kind"] == "taught"
    assert record["config"]["attention"]["ref"] == str(tmp_path / "teacher")
    before, after = (dict(load_checkpoint(f"{run}@{step}").model.named_parameters()) for step in (0, 3))
    for layer in range(3):
        moved = not torch.equal(before[f"blocks.{layer}.attn.W_Q"], after[f"blocks.{layer}.attn.W_Q"])
        assert moved == (layer == 1)
        assert not torch.equal(before[f"blocks.{layer}.attn.W_V"], after[f"blocks.{layer}.attn.W_V"])


@pytest.mark.parametrize(
    ("n_layers", "layers", "message"), [(2, [0], "match model"), (3, [3], "layers are 0 to 2")]
)
def test_what_cannot_teach(tmp_path, n_layers, layers, message):
    task = matrices()
    teacher = task.build_model(0, task.Model(**{**SETTINGS, "n_layers": n_layers}))
    save_checkpoint(tmp_path / "teacher", teacher, task=task)
    config = {**CONFIG, "attention_from": str(tmp_path / "teacher"), "attention_layers": layers}
    with pytest.raises(UserError, match=message):
        train(task, out=tmp_path / "run", settings=SETTINGS, config=config)
