"""Seeds trained as one: equal to separate runs, in folders that either way of training goes on from."""

from __future__ import annotations

import os
import shutil

import numpy
import pytest
import torch
from safetensors.torch import load_file

import tasks
from interp_tasks import UserError, load_checkpoint, train, train_stacked
from interp_tasks.checkpoints import read_metrics, read_run, stored_steps
from interp_tasks.cli import main
from interp_tasks.errors import Stopped
from interp_tasks.training import stacked as stacking
from interp_tasks.training.clock import free_memory
from interp_tasks.training.components import freeze_others
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.cost import state_bytes, weight_bytes
from interp_tasks.training.dropout import Dropout
from interp_tasks.training.forward import FusedForward
from interp_tasks.training.optimizer import Updater
from interp_tasks.training.stacked import Stack, checked_seeds
from interp_tasks.training.stacked_forward import StackedForward
from interp_tasks.training.stacked_optimizer import StackedParameters, StackedUpdater, is_shared

SEEDS = (0, 3, 4)
TINY = {"d_model": 8, "n_heads": 2}
#: Everything that an update may do, at once.
HARD = {
    "batch_size": 6,
    "grokfast": "ema",
    "dropout": 0.2,
    "clip_norm": 0.05,
    "warmup_steps": 5,
    "schedule": "cosine",
    "schedule_end": 12,
    "schedule_floor": 0.1,
    "weight_decay": 0.1,
    "checkpoint_every": 4,
    "log_every": 3,
    "l1": 1e-4,
    "threads": 1,
}


@pytest.fixture
def addition():
    return tasks.get("modular-addition", p=7)


@pytest.fixture
def matrices():
    return tasks.get("matrix-completion", n=2, rank=1, grid_max=1, grid_step=0.1)


def weights(run, step):
    return load_file(run / "checkpoints" / f"{step:08d}" / "model.safetensors")


def assert_close_runs(one, other, step, tolerance=1e-4):
    """Equal to ``tolerance`` of each tensor's largest change since the start.

    But for b_K, which softmax cancels: its gradient is rounding alone, and Adam divides that by its own size.
    """
    expected, start = weights(other, step), weights(other, 0)
    moved = 0.0
    for name, tensor in weights(one, step).items():
        if name.endswith("b_K"):
            continue
        change = (expected[name] - start[name]).abs().max().item()
        moved = max(moved, change)
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance * change + 1e-9, msg=name)
    assert moved > 1e-3


ARCHITECTURES = {
    "one layer": {},
    "two layers, LayerNorm, biases": {"n_layers": 2, "normalization": "LN", "biases": "trained"},
    "bidirectional, gelu": {
        "n_layers": 2,
        "attention": "bidirectional",
        "act_fn": "gelu",
        "normalization": "LN",
    },
    "attention only": {"n_layers": 2, "attn_only": True},
    "post-norm": {"n_layers": 2, "normalization": "LN", "norm": "post", "attention": "bidirectional"},
}


def doubled(task, settings, seeds=SEEDS):
    """Models in float64, every parameter drawn, a copy of each to be stacked and one to stay as it is."""
    models = []
    for seed in seeds:
        model = task.build_model(seed, task.Model(**TINY, **settings)).double()
        stream = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
            parameter.requires_grad_(True)
        models.append(model)
    return models


def seeds_of_dropout(rate, masks):
    return [Dropout(rate, masks, 3, seed, 11) for seed in SEEDS] if rate else []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shared_tokens", [True, False])
@pytest.mark.parametrize(("batch", "dropout"), [(5, 0.0), (40, 0.3)], ids=["computed", "looked up, dropout"])
def test_outputs_and_gradients_are_those_of_each_model(addition, architecture, shared_tokens, batch, dropout):
    alone, stacked = (doubled(addition, ARCHITECTURES[architecture]) for _ in range(2))
    stream = torch.Generator().manual_seed(2)
    tokens = torch.randint(8, (len(SEEDS), batch, 3), generator=stream)
    if shared_tokens:
        tokens = tokens[0]
    dropouts = seeds_of_dropout(dropout, "per-sample")
    parameters = StackedParameters(stacked)
    read = addition.read_positions
    got = StackedForward(stacked, read, parameters.tensors)(tokens, dropouts)
    weigh = torch.randn(got.shape, generator=stream, dtype=torch.float64)
    (got * weigh).sum().backward()
    for index, model in enumerate(alone):
        forward = FusedForward(model, read)
        expected = forward(tokens if shared_tokens else tokens[index], dropouts[index] if dropouts else None)
        (expected * weigh[index]).sum().backward()
        torch.testing.assert_close(got[index], expected, rtol=1e-10, atol=1e-10)
        for name, parameter in model.named_parameters():
            gradient = parameters.tensors[name].grad[index]
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-10, msg=name)
        assert expected.std() > 0.01


@pytest.mark.parametrize("masks", ["per-sample", "shared"])
def test_masks_of_dropout_are_each_seeds_own(addition, masks):
    models = doubled(addition, {"n_layers": 1})
    tokens = torch.randint(8, (9, 3), generator=torch.Generator().manual_seed(0))
    parameters = StackedParameters(models)
    dropouts = seeds_of_dropout(0.4, masks)
    got = StackedForward(models, addition.read_positions, parameters.tensors)(tokens, dropouts)
    for index, model in enumerate(models):
        expected = FusedForward(model, addition.read_positions)(tokens, dropouts[index])
        torch.testing.assert_close(got[index], expected, rtol=1e-10, atol=1e-10)


UPDATES = {
    "adamw": {"weight_decay": 0.1},
    "adam": {"optimizer": "adam", "weight_decay": 0.1, "warmup_steps": 3},
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
    "falling": {"schedule": "linear", "schedule_start": 2, "schedule_end": 6, "schedule_floor": 0.01},
    "ema, clipped": {"grokfast": "ema", "clip_norm": 0.5},
    "ma, clipped": {"grokfast": "ma", "grokfast_window": 3, "clip_norm": 0.5},
}


@pytest.mark.parametrize("update", UPDATES)
def test_updates_and_states_are_those_of_each_model(addition, update):
    """Gradients of very different sizes: a norm taken over all seeds would clip other ones."""
    alone, stacked = (doubled(addition, {}) for _ in range(2))
    config = TrainConfig(learning_rate=0.01, **UPDATES[update])
    parameters = StackedParameters(stacked)
    together = StackedUpdater(parameters, config)
    apart = [Updater(model, config) for model in alone]
    stream = torch.Generator().manual_seed(5)
    for step in range(7):
        for tensor in parameters.tensors.values():
            tensor.grad = torch.randn(tensor.shape, generator=stream, dtype=torch.float64)
            for index, factor in enumerate((0.01, 1.0, 100.0)):
                tensor.grad[index] *= factor
        for index, model in enumerate(alone):
            for name, parameter in model.named_parameters():
                parameter.grad = parameters.tensors[name].grad[index].clone()
        if step == 4:
            # What one seed stores is all that it needs to go on, together or alone.
            states = [together.state_of(index) for index in range(len(SEEDS))]
            states = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
            for index, updater in enumerate(apart):
                own = updater.state()
                assert own.keys() == states[index].keys()
                for name, tensor in own.items():
                    torch.testing.assert_close(states[index][name], tensor, rtol=1e-9, atol=1e-9, msg=name)
            together = StackedUpdater(parameters, config)
            together.load_states(states)
            apart = [Updater(model, config) for model in alone]
            for updater, state in zip(apart, states, strict=True):
                updater.load_state({name: tensor.clone() for name, tensor in state.items()})
        together.update(step)
        for updater in apart:
            updater.update(step)
    for index, model in enumerate(alone):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameters.tensors[name][index], parameter, rtol=1e-9, atol=1e-9, msg=name
            )
            assert torch.equal(stacked[index].get_parameter(name), parameters.tensors[name][index])


def test_runs_are_those_of_seeds_trained_apart(addition, tmp_path):
    """Float32, 14 steps: weights to 1e-4 of how far they have moved, metrics to 1e-4."""
    config = {**HARD, "steps": 14, "gradient_norms_every": 7}
    runs = train_stacked(addition, out=tmp_path / "s", seeds=SEEDS, settings=TINY, config=config)
    assert runs == [tmp_path / "s" / f"seed-{seed}" for seed in SEEDS]
    for seed, run in zip(SEEDS, runs, strict=True):
        alone = train(addition, out=tmp_path / f"{seed}", settings=TINY, config={**config, "seed": seed})
        assert stored_steps(run) == stored_steps(alone)
        for step in (0, 4, 14):
            if step:
                assert_close_runs(run, alone, step)
        assert all(torch.equal(tensor, weights(alone, 0)[name]) for name, tensor in weights(run, 0).items())
        for line, expected in zip(read_metrics(run), read_metrics(alone), strict=True):
            assert line.keys() == expected.keys()
            for key in expected.keys() & {"train_loss", "learning_rate", "train", "validation"}:
                assert line[key] == pytest.approx(expected[key], rel=1e-4)
            for stage, norms in expected.get("gradient_norm", {}).items():
                assert line["gradient_norm"][stage] == pytest.approx(norms, rel=1e-3, abs=1e-7)
        stored = read_run(run)
        assert stored["stacked"] == {"seeds": list(SEEDS), "loss": "mapped"}
        assert stored["config"] == read_run(alone)["config"]
        assert read_run(alone)["stacked"] is None
        assert load_checkpoint(f"{run}@last").step == 14


def test_each_seed_draws_its_own_batches(matrices, tmp_path):
    """Online: the batches are those of separate runs, and the MASK row is nobody's to train."""
    config = {
        "steps": 6,
        "batch_size": 16,
        "clip_norm": 0.1,
        "log_every": 2,
        "weight_decay": 0.1,
        "threads": 1,
    }
    runs = train_stacked(matrices, out=tmp_path / "s", seeds=(0, 1), settings=TINY, config=config)
    for seed, run in enumerate(runs):
        alone = train(matrices, out=tmp_path / f"{seed}", settings=TINY, config={**config, "seed": seed})
        assert_close_runs(run, alone, 6)
        table = weights(run, 6)["embed.W_E"]
        assert not table[0].any()
        assert table[1:].any()


def test_runs_without_a_step_in_common_are_refused_and_kept(addition, tmp_path):
    config = {**HARD, "steps": 4}
    runs = train_stacked(addition, out=tmp_path, seeds=SEEDS, settings=TINY, config=config)
    train(addition, out=runs[1], settings=TINY, config={**config, "steps": 14, "seed": 3})
    with pytest.raises(UserError, match=r"seed-0 and .*seed-3 have no step in common to go on from"):
        train_stacked(addition, out=tmp_path, seeds=SEEDS, settings=TINY, config={**config, "steps": 15})
    assert stored_steps(runs[1])[-1] == 14
    assert read_metrics(runs[1])[-1]["step"] == 14


def test_a_new_seed_that_cannot_join_leaves_no_folder(addition, tmp_path):
    config = {**HARD, "steps": 14}
    runs = train_stacked(addition, out=tmp_path, seeds=(1, 2), settings=TINY, config=config)
    longer = {**config, "steps": 15}
    with pytest.raises(UserError, match="no step in common to go on from"):
        train_stacked(addition, out=tmp_path, seeds=(0, 1, 2), settings=TINY, config=longer)
    for run in runs:
        shutil.rmtree(run / "checkpoints")
    other = {**config, "learning_rate": 0.5}
    with pytest.raises(UserError, match="made by another config"):
        train_stacked(addition, out=tmp_path, seeds=(0, 1, 2), settings=TINY, config=other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed-1", "seed-2"]


def test_more_seeds_than_memory_has_room_for_are_refused_with_one_model_built(
    addition, tmp_path, monkeypatch
):
    """Adam: a gradient and two moments beside every parameter that trains, each in float32."""
    parameters = list(addition.build_model(0, addition.Model(**TINY)).parameters())
    each = sum(4 * one.numel() * (4 if one.requires_grad else 1) for one in parameters)
    first = sum(4 * one.numel() for one in parameters)
    plain, built = type(addition).build_model, []
    monkeypatch.setattr(type(addition), "build_model", lambda *given: built.append(1) or plain(*given))
    arguments = {"out": tmp_path / "runs", "settings": TINY, "config": {"steps": 1}}
    monkeypatch.setattr(stacking, "free_memory", lambda device: 20 * each - first - 1)
    with pytest.raises(UserError, match=r"20 seeds as one need .* GiB .* free, for 19 of them: stack fewer$"):
        train_stacked(addition, seeds=range(20), **arguments)
    assert built == [1]
    assert not (tmp_path / "runs").exists()
    for enough in (2 * each - first, None):
        monkeypatch.setattr(stacking, "free_memory", lambda device, enough=enough: enough)
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        assert len(train_stacked(addition, seeds=range(2), **arguments)) == 2


def test_what_the_optimiser_holds_is_what_was_counted(addition):
    """Of the tensors themselves, once an update was made."""
    config = TrainConfig(grokfast="ema", train_parts=("mlp",))
    models = [addition.build_model(seed, addition.Model(**TINY)) for seed in SEEDS]
    for model in models:
        freeze_others(model, config)
    counted = len(SEEDS) * (sum(weight_bytes(models[0])) + sum(state_bytes(models[0], config)))
    parameters = StackedParameters(models)
    updater = StackedUpdater(parameters, config)
    held = list(parameters.tensors.values())
    trained = [tensor for tensor in held if tensor.requires_grad]
    for tensor in trained:
        tensor.grad = torch.ones_like(tensor)
    held += [tensor.grad for tensor in trained]
    updater.update(0)
    held += [tensor for name, tensor in updater.state().items() if not is_shared(name, tensor)]
    assert sum(tensor.nbytes for tensor in held) == counted


def test_free_memory_is_between_nothing_and_all():
    found = free_memory("cpu")
    assert free_memory("meta") is None
    if found is None:
        pytest.skip("this system does not tell")
    assert 0 < found <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("behind", [0, 2])
def test_a_kill_between_two_checkpoints_costs_one_of_them(addition, tmp_path, behind, monkeypatch):
    config = {**HARD, "steps": 14}
    expected = train_stacked(addition, out=tmp_path / "whole", seeds=SEEDS, settings=TINY, config=config)
    from interp_tasks.checkpoints.run_folder import RunFolder

    save, saved = RunFolder.save, []

    class Killed(BaseException):
        pass

    def save_some(self, step, *arguments, **options):
        if step == 8 and len(saved) == behind:
            raise Killed
        saved.extend([step] * (step == 8))
        return save(self, step, *arguments, **options)

    monkeypatch.setattr(RunFolder, "save", save_some)
    with pytest.raises(Killed):
        train_stacked(addition, out=tmp_path / "killed", seeds=SEEDS, settings=TINY, config=config)
    monkeypatch.undo()
    torch.manual_seed(99)  # the state of the process that resumes is not the run's
    runs = train_stacked(addition, out=tmp_path / "killed", seeds=SEEDS, settings=TINY, config=config)
    for run, whole in zip(runs, expected, strict=True):
        assert all(torch.equal(tensor, weights(whole, 14)[name]) for name, tensor in weights(run, 14).items())
        assert read_metrics(run) == read_metrics(whole)


def test_stopped_where_it_is_and_extended(addition, tmp_path):
    config = {**HARD, "steps": 14}
    whole = train_stacked(addition, out=tmp_path / "whole", seeds=SEEDS, settings=TINY, config=config)
    asked = iter([False] * 5 + [True])
    out = tmp_path / "stopped"
    with pytest.raises(Stopped, match=r"seed-0 and 2 more: stopped after step 6 of 10"):
        train_stacked(
            addition,
            out=out,
            seeds=SEEDS,
            settings=TINY,
            config={**config, "steps": 10},
            stop=lambda: next(asked),
        )
    train_stacked(addition, out=out, seeds=SEEDS, settings=TINY, config={**config, "steps": 10})
    train_stacked(addition, out=out, seeds=SEEDS, settings=TINY, config=config)
    for seed, run in zip(SEEDS, whole, strict=True):
        for name, tensor in weights(out / f"seed-{seed}", 14).items():
            assert torch.equal(tensor, weights(run, 14)[name])


def test_either_way_of_training_goes_on_from_the_other(addition, tmp_path):
    config = {**HARD, "steps": 6}
    longer = {**HARD, "steps": 14}
    straight = train(addition, out=tmp_path / "straight", settings=TINY, config={**longer, "seed": 3})
    together = train_stacked(addition, out=tmp_path / "a", seeds=SEEDS, settings=TINY, config=config)[1]
    train(addition, out=together, settings=TINY, config={**longer, "seed": 3})
    assert_close_runs(together, straight, 14)
    assert read_run(together)["resumed"][-1]["stacked"] is None
    for seed in SEEDS:
        train(addition, out=tmp_path / "b" / f"seed-{seed}", settings=TINY, config={**config, "seed": seed})
    train_stacked(addition, out=tmp_path / "b", seeds=SEEDS, settings=TINY, config=longer)
    assert_close_runs(tmp_path / "b" / "seed-3", straight, 14)


def test_finished_seeds_are_left_alone_and_new_ones_join(addition, tmp_path):
    config = {"steps": 4}
    first = train_stacked(addition, out=tmp_path, seeds=(0, 1), settings=TINY, config=config)
    before = (first[0] / "metrics.jsonl").stat().st_mtime_ns
    runs = train_stacked(addition, out=tmp_path, seeds=(0, 1, 2), settings=TINY, config=config)
    assert (first[0] / "metrics.jsonl").stat().st_mtime_ns == before
    assert read_run(runs[2])["stacked"]["seeds"] == [2]
    with pytest.raises(UserError, match=r"train.steps: 4 there, 3 asked for"):
        train_stacked(addition, out=tmp_path, seeds=(0, 1), settings=TINY, config={"steps": 3})


def test_parts_that_do_not_train_stay(addition, tmp_path):
    source = train(addition, out=tmp_path / "source", settings=TINY, config={"steps": 2, "seed": 9})
    config = {"steps": 3, "train_parts": ("mlp",), "start_from": f"{source}@last", "threads": 1}
    runs = train_stacked(addition, out=tmp_path / "s", seeds=(0, 1), settings=TINY, config=config)
    for seed, run in enumerate(runs):
        assert torch.equal(weights(run, 3)["embed.W_E"], weights(source, 2)["embed.W_E"])
        alone = train(addition, out=tmp_path / f"{seed}", settings=TINY, config={**config, "seed": seed})
        assert_close_runs(run, alone, 3)


def test_a_loss_that_cannot_be_mapped_is_taken_one_by_one(addition, tmp_path, monkeypatch):
    """Its value decides what it computes: no vmap can follow."""
    plain = type(addition).loss

    def branching(self, output, batch):
        loss = plain(self, output, batch)
        return loss * 2 if loss.item() > 0 else loss

    monkeypatch.setattr(type(addition), "loss", branching)
    config = {"steps": 3, "threads": 1}
    runs = train_stacked(addition, out=tmp_path / "s", seeds=(0, 1), settings=TINY, config=config)
    assert read_run(runs[1])["stacked"]["loss"] == "one by one"
    alone = train(addition, out=tmp_path / "1", settings=TINY, config={**config, "seed": 1})
    assert_close_runs(runs[1], alone, 3)


def test_bf16_and_observers(matrices, tmp_path):
    config = {
        "steps": 4,
        "batch_size": 8,
        "precision": "bf16",
        "observe": ("hook_embed",),
        "observe_every": 2,
        "threads": 1,
    }
    runs = train_stacked(matrices, out=tmp_path / "s", seeds=(0, 1), settings=TINY, config=config)
    for run in runs:
        assert all(tensor.dtype == torch.float32 for tensor in weights(run, 4).values())
        assert sorted(path.name for path in (run / "activations").iterdir())[-1] == "00000004.safetensors"
    alone = train(matrices, out=tmp_path / "1", settings=TINY, config={**config, "seed": 1})
    losses = [read_metrics(run)[-1]["train_loss"] for run in (runs[1], alone)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_time_of_an_update_is_shared_out(addition, tmp_path, monkeypatch):
    from interp_tasks.checkpoints.run_files import read_clock
    from interp_tasks.training import clock

    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    plain = Stack.update

    def slower(self, step):
        now[0] += 4.0
        return plain(self, step)

    monkeypatch.setattr(Stack, "update", slower)
    for steps in (4, 8):
        runs = train_stacked(
            addition, out=tmp_path, seeds=(0, 1), settings=TINY, config={"steps": steps, "log_every": 2}
        )
        now[0] += 1e6
    for run in runs:
        assert read_clock(run)[8] == 16.0


def test_one_diverging_seed_is_named(matrices, tmp_path):
    config = {"steps": 200, "batch_size": 4, "learning_rate": 1e30, "log_every": 1}
    with pytest.raises(UserError, match=r"seed-0: training diverged"):
        train_stacked(matrices, out=tmp_path, seeds=(0, 1), settings=TINY, config=config)


def test_what_cannot_be_stacked_is_refused_in_one_line(addition, tmp_path):
    sizes = tasks.get("matrix-completion-sizes", sizes=(2, 3), rank=1)
    with pytest.raises(UserError, match="batches of several shapes: train its seeds one after another"):
        train_stacked(sizes, out=tmp_path / "a", seeds=(0, 1), settings=TINY, config={"batch_size": 4})
    plain = type(addition).sample

    def uneven(self, n, seed=0, split="test"):
        batch = plain(self, n, seed, split)
        return batch[: 3 + seed % 2] if split == "train" else batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(addition), "sample", uneven)
        with pytest.raises(UserError, match="batches of several shapes: train its seeds one after another"):
            # Seeds of whose first batches one is even and one is odd.
            train_stacked(
                addition, out=tmp_path / "a", seeds=range(8), settings=TINY, config={"batch_size": 5}
            )
    with pytest.raises(UserError, match="no seeds to train"):
        train_stacked(addition, out=tmp_path / "a", seeds=(), settings=TINY)
    with pytest.raises(UserError, match=r"did you mean train.steps"):
        train_stacked(addition, out=tmp_path / "a", seeds=(0, 1), config={"step": 1})
    assert not (tmp_path / "a").exists()


def test_command(tmp_path, capsys):
    out = str(tmp_path / "runs")
    asked = [
        "train",
        "modular-addition",
        "--set",
        "task.p=5",
        "--set",
        "train.steps=3",
        "--set",
        "model.d_model=8",
    ]
    assert main([*asked, "--seeds", "0:3", "--stacked", "--out", out, "--quiet"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed] == [f"{out}/seed-{seed}@last" for seed in range(3)]
    assert main([*asked, "--stacked", "--out", out]) == 2
    assert (
        capsys.readouterr().err
        == "interp-run: --stacked trains several seeds as one: give --seeds 0:8 with it\n"
    )


@pytest.mark.parametrize("seeds", ["0:2", 3, [0.5], [-1], [True], ["0"], None, []])
def test_seeds_that_are_none_are_refused_in_one_line(seeds):
    with pytest.raises(UserError, match="seeds"):
        checked_seeds(seeds)


def test_seeds_are_looked_at_before_anything_is_written(addition, tmp_path):
    with pytest.raises(UserError, match="seeds are whole numbers from 0 up"):
        train_stacked(addition, out=tmp_path / "runs", seeds=[-1], settings=TINY, config={"steps": 1})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("seeds", [torch.tensor([2, 0]), numpy.array([2, 0]), (seed for seed in (2, 0, 2))])
def test_seeds_may_be_numbers_of_arrays_and_are_trained_once(seeds):
    found = checked_seeds(seeds)
    assert found == [2, 0]
    assert all(type(seed) is int for seed in found)
