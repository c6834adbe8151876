"""The autoregressive form: its sequence, its loss and metrics against loops, greedy decoding against plain forwards."""

import pytest
import torch
import torch.nn.functional as F

import tasks
from tasks import TaskError, pool
from tasks.matrix_completion import AutoregressiveCompletion
from tasks.matrix_completion.autoregressive import greedy_decode

SMALL = {"n_layers": 2, "n_heads": 2, "d_model": 16, "init_std": 0.3}


@pytest.fixture
def task():
    return AutoregressiveCompletion(n=2, m=3, rank=1, grid_max=1.2, grid_step=0.2)


def test_ids_are_those_of_the_published_code():
    """Grid [-2, 2] in steps of 0.01: ids 1 to 401, 0 hidden, 404 SEP, 405 in all."""
    task = AutoregressiveCompletion()
    assert (task.d_vocab, task.separator_id, task.sequence_length) == (405, 404, 98)
    assert task.encode(torch.tensor([-2.0, 0.0, 2.0, -1.2, -1.07])).tolist() == [1, 201, 401, 81, 94]
    assert task.decode(torch.tensor([0, 402, 403, 404])).isnan().all()
    assert task.decode(torch.tensor([1, 401])).tolist() == [-2, 2]


def test_the_sequence_is_masked_entries_separator_full_entries(task):
    batch = task.sample(30)
    hidden = batch.extras["hidden"]
    whole = torch.cat([batch.tokens, batch.targets[:, -1:]], 1)
    masked, separator, full = whole[:, :6], whole[:, 6], whole[:, 7:]
    assert (separator == task.separator_id).all()
    assert torch.equal(masked == 0, hidden)
    assert torch.equal(masked[~hidden], full[~hidden])
    assert full.min() >= 1
    assert full.max() <= 13
    assert torch.equal(batch.targets, whole[:, 1:])


@pytest.mark.parametrize(("loss_on", "positions"), [("sequence", range(12)), ("answer", range(6, 12))])
def test_the_loss_is_of_every_next_token_or_of_the_answer(loss_on, positions):
    task = AutoregressiveCompletion(n=2, m=3, rank=1, grid_max=1.2, grid_step=0.2, loss_on=loss_on)
    batch = task.sample(5)
    output = torch.randn(5, 12, task.d_vocab, generator=torch.Generator().manual_seed(0))
    by_hand = [-output[b, p].log_softmax(-1)[batch.targets[b, p]].item() for b in range(5) for p in positions]
    assert task.read_positions == tuple(positions)
    for given in (output, task.read(output)):
        assert task.loss(given, batch).item() == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_metrics_against_a_loop_over_entries(task):
    batch = task.sample(20)
    output = torch.randn(20, 12, task.d_vocab, generator=torch.Generator().manual_seed(0))
    # Half of the answers right, so that accuracies are neither 0 nor those of chance.
    for b in range(10):
        output[b, torch.arange(6, 12), batch.targets[b, 6:]] += 20
    found = pool(task.metrics(output, batch))
    right = {True: [], False: []}
    errors = {True: [], False: []}
    for b in range(20):
        for entry in range(6):
            logits, target = output[b, 6 + entry], batch.targets[b, 6 + entry]
            hidden = bool(batch.extras["hidden"][b, entry])
            right[hidden].append(float(logits.argmax() == target))
            values = 0.2 * torch.arange(-6, 7)
            mean = (logits[1:14].softmax(0) * values).sum()
            errors[hidden].append(float((mean - values[target - 1]) ** 2))
    for hidden, place in ((True, "hidden"), (False, "observed")):
        assert found[f"accuracy_{place}"] == pytest.approx(sum(right[hidden]) / len(right[hidden]))
        name = "mse_masked" if hidden else "mse_observed"
        assert found[name] == pytest.approx(sum(errors[hidden]) / len(errors[hidden]), rel=1e-4)
    expected = F.cross_entropy(output[:, 6:].flatten(0, 1), batch.targets[:, 6:].flatten()).item()
    assert found["loss_answer"] == pytest.approx(expected, rel=1e-5)
    assert pool(task.metrics(output[:, 6:], batch)) == pytest.approx(found)


def test_greedy_decoding_reads_its_own_answers(task):
    """With kept keys and values, the same as running the whole prefix anew for every token."""
    model = task.build_model(0, task.Model(**SMALL))
    batch = task.sample(16)
    model.train()
    found = greedy_decode(model, batch.tokens[:, :7], 6)
    assert model.training
    prefix = batch.tokens[:, :7]
    with torch.no_grad():
        for _ in range(6):
            prefix = torch.cat([prefix, model(prefix)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, prefix[:, 7:])
    right = found == batch.targets[:, 6:]
    hidden = batch.extras["hidden"]
    pooled = pool(task.decoded(model, batch))
    assert pooled["accuracy_hidden"] == pytest.approx(right[hidden].double().mean().item())
    assert pooled["accuracy_observed"] == pytest.approx(right[~hidden].double().mean().item())


def test_size_and_sign_of_hidden_entries_are_told_apart(task, monkeypatch):
    """Against the decoded values: turning signs keeps sizes and no sign; a wrong size has no sign to be right."""
    from tasks.matrix_completion import autoregressive

    batch = task.sample(32)
    values, hidden = task._flattened_full_matrices(batch), batch.extras["hidden"]
    answers = task.encode(-values)
    answers[:, 1] = task.encode((values[:, 1].abs() < 0.5).float())  # 0 or 1: another size than the true one
    monkeypatch.setattr(autoregressive, "greedy_decode", lambda model, prompts, n: answers)
    found = task.decoded(None, batch)
    wrong = torch.zeros_like(hidden)
    wrong[:, 1] = values[:, 1].abs() != (values[:, 1].abs() < 0.5).float()
    assert torch.equal(found["size_hidden"][0], (hidden & ~wrong).sum(1))
    assert torch.equal(found["size_hidden"][1], hidden.sum(1))
    turned = hidden & ~wrong & (values != 0)
    total, count = found["sign_hidden"]
    assert torch.equal(count, turned.sum(1))
    agree = turned & (task.decode(answers) == values)
    assert torch.equal(total, agree.sum(1))
    assert int(total.sum()) < int(count.sum()) / 2


def test_templates_look_from_the_answer_into_the_masked_half(task):
    templates = task.attention_templates()
    batch = task.sample(4)
    keys = {
        name: template(batch) if callable(template) else template.expand(4, -1, -1)
        for name, template in templates.items()
    }
    for name, held in keys.items():
        assert held.shape == (4, 12, 12), name
        assert not held[:, :6].any(), name
        assert not held.triu(1).any(), name
    # The query at position 6 + 4 predicts entry 4, in row 1 and column 1 of 2 × 3.
    row = {name: held[0, 10].nonzero().flatten().tolist() for name, held in keys.items()}
    hidden = batch.extras["hidden"][0].nonzero().flatten().tolist()
    assert row == {
        "separator": [6],
        "matching": [4],
        "last": [3],
        "row": [3, 5],
        "column": [1],
        "hidden": hidden,
        "observed": sorted({0, 1, 2, 3, 4, 5} - set(hidden)),
        "answered": [7, 8, 9, 10],
    }


def test_probe_targets_are_the_entries_that_positions_predict(task):
    batch = task.sample(6)
    found = task.probe_targets(batch)
    assert found.positions == tuple(range(6, 12))
    assert torch.equal(found.targets["next_element"].values[:, 6:], task._flattened_full_matrices(batch))
    assert torch.equal(found.splits["hidden"][:, 6:], batch.extras["hidden"])
    assert not found.splits["hidden"][:, :6].any()
    assert not found.splits["observed"][:, :6].any()


def test_the_model_is_causal_and_refused_without_room(task):
    model = task.build_model(0, task.Model(**SMALL))
    batch = task.sample(3)
    later = batch.tokens.clone()
    later[:, 8:] = 1
    with torch.no_grad():
        assert torch.allclose(model(batch.tokens)[:, :8], model(later)[:, :8], atol=1e-6)
    with pytest.raises(TaskError, match="too short"):
        task.build_model(0, task.Model(**SMALL, n_ctx=5))
    paper = tasks.task_class("matrix-completion-autoregressive").presets["paper"]
    assert paper["model"]["n_ctx"] == 99
