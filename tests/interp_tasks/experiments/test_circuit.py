"""``interp-run circuit``: its numbers against a forward written by hand, its search, its refusals, its files."""

import math

import pytest
import torch

import tasks
from circuits import circuit as circuits
from circuits.interventions.replacements import derangement
from interp_tasks import experiments
from interp_tasks.checkpoints import load_checkpoint, save_checkpoint
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.experiments.circuit_experiment import metrics_to_test_and_rank, split_halves
from interp_tasks.measurement.loaded_checkpoints import subjects
from interp_tasks.measurement.options_and_examples import Examples

N, SEED = 24, 3
#: Copying is what the small model does; completing it does not.
SHARED = {"samples": N, "seed": SEED, "metric": "mse_observed"}


@pytest.fixture(scope="module")
def copier(task, models, tmp_path_factory):
    """A checkpoint that copies values, by way of everything: embed writes them along the unembedding."""
    model = task.build_model(5, task.Model(n_layers=2, n_heads=2, d_model=16, init_std=0.2))
    with torch.no_grad():
        along = model.W_U[:, 0] / model.W_U[:, 0].norm()
        for token, value in task.token_values().items():
            model.W_E[token] += 4 * value * along
        # So that the final norm's output has the size of an entry.
        model.W_U[:, 0] = along * 0.15
        model.b_U.zero_()
    return str(save_checkpoint(tmp_path_factory.mktemp("copier") / "c", model, task, step=7))


@pytest.fixture(scope="module")
def found(copier):
    return experiments.circuit(copier, method="exact", random=3, **SHARED)


@pytest.fixture(scope="module")
def examples(copier):
    """The half that finds and the half that tests, each a batch and the batch of its source."""
    task = load_checkpoint(copier).task
    batch = task.sample(N, seed=SEED)
    source = task.attention_moves(batch, SEED)["values"]
    return [(batch[rows], source[rows]) for rows in (slice(0, N // 2), slice(N // 2, N))]


def forward(model, tokens, hears=None, written=None):
    """The output [batch pos 1] of a pre-norm model, with an input of its own for every receiver.

    hears(sender, receiver, own): what a receiver gets of a sender; `written` collects what senders write.
    """
    hears = hears or (lambda sender, receiver, own: own)
    written = {} if written is None else written
    written |= {
        "embed": model.W_E[tokens],
        "pos_embed": model.W_pos[: tokens.shape[1]].expand(len(tokens), -1, -1),
    }

    def into(receiver, norm):
        biases = (own for sender, own in written.items() if sender.startswith("b_O"))
        heard = (
            hears(sender, receiver, own) for sender, own in written.items() if not sender.startswith("b_O")
        )
        x = sum(heard) + sum(biases)
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt() * norm.w + norm.b

    for layer, block in enumerate(model.blocks):
        attn, heads = block.attn, {}
        for head in range(model.cfg.n_heads):
            q, k, v = (
                into(f"{layer}.{head}.{site}", block.ln1) @ getattr(attn, f"W_{site.upper()}")[head]
                + getattr(attn, f"b_{site.upper()}")[head]
                for site in "qkv"
            )
            z = (q @ k.mT / model.cfg.d_head**0.5).softmax(-1) @ v
            heads[f"{layer}.{head}"] = z @ attn.W_O[head]
        written |= heads
        written[f"b_O.{layer}"] = attn.b_O.expand_as(written["embed"])
        hidden = into(f"mlp{layer}", block.ln2) @ block.mlp.W_in + block.mlp.b_in
        hidden = hidden.relu() if model.cfg.act_fn == "relu" else torch.nn.functional.gelu(hidden)
        written[f"mlp{layer}"] = hidden @ block.mlp.W_out + block.mlp.b_out
    return into("output", model.ln_final) @ model.W_U + model.b_U


def error(output, batch):
    """mse_observed, by hand."""
    seen = ~batch.extras["hidden"]
    return float((output[..., 0] - batch.targets).square()[seen].double().mean())


def kept(model, batch, source, names):
    """mse_observed where the edges `names` carry what the run computes, and all others what the source does."""
    theirs = {}
    forward(model, source.tokens, written=theirs)

    def hears(sender, receiver, own):
        return own if f"{sender} -> {receiver}" in names else theirs[sender]

    return error(forward(model, batch.tokens, hears), batch)


@torch.no_grad()
def faithfulness(model, half, names):
    batch, source = half
    # The metric of the source run is judged by the targets of the run.
    low, high = error(forward(model, source.tokens), batch), error(forward(model, batch.tokens), batch)
    return (kept(model, batch, source, names) - low) / (high - low)


def rows_of(result, variant):
    return result.frame[result.frame["variant"] == variant].set_index("metric")


def test_faithfulness_is_that_of_a_forward_by_hand(found, copier, examples):
    model = load_checkpoint(copier).model
    finding, testing = examples
    (circuit,) = found.data["circuits"].values()
    own = rows_of(found, "circuit")
    names = set(circuit)
    assert 0 < len(names) < own.loc["size", "baseline"] == len(circuits.full(model)) - 1 - 2 * 6 - 2
    assert own.loc["size", "value"] == len(names)
    assert own.loc["faithfulness", "value"] == pytest.approx(faithfulness(model, testing, names), abs=1e-4)
    on_finding = faithfulness(model, finding, names)
    assert own.loc["faithfulness, finding half", "value"] == pytest.approx(on_finding, abs=1e-4)
    assert on_finding >= 0.9
    # One edge less, the last of the ranking, is not enough.
    members = circuit.frame.sort_values("effect", key=abs, ascending=False)["name"].tolist()
    assert faithfulness(model, finding, set(members[:-1])) < 0.9
    with torch.no_grad():
        expected = kept(model, *testing, names)
        clean = error(forward(model, testing[0].tokens), testing[0])
    assert own.loc["mse_observed", "value"] == pytest.approx(expected, rel=1e-4)
    assert own.loc["mse_observed", "baseline"] == pytest.approx(clean, rel=1e-4)
    assert own["n"].eq(N // 2).all()


def test_estimates_rank_where_nothing_is_measured(copier):
    result = experiments.circuit(copier, kind="nodes", curve=False, random=2, **SHARED)
    (circuit,) = result.data["circuits"].values()
    assert circuit.kind == "nodes"
    assert len(circuit) == rows_of(result, "circuit").loc["size", "value"]
    assert circuit.frame["estimate"].notna().all()
    assert set(result.data["curves"]) == set()


def test_edges_at_named_positions(copier):
    (subject,) = subjects(copier, Examples(samples=N, seed=SEED))
    length = subject.tokens.shape[1]
    asked = {"curve": False, "random": 2, **SHARED}
    whole = experiments.circuit(copier, **asked)
    one = experiments.circuit(copier, spans={"all": range(length)}, **asked)
    names = ["size", "faithfulness", "mse_observed"]
    for column in ("value", "baseline"):
        expected, found = (rows_of(each, "circuit")[column][names].tolist() for each in (whole, one))
        assert found == pytest.approx(expected, rel=1e-6)
    spans = {"first": (0, 1), "rest": tuple(range(2, length))}
    written = "; ".join(f"{name}={','.join(map(str, span))}" for name, span in spans.items())
    two = experiments.circuit(copier, spans=written, **asked)
    (circuit,) = two.data["circuits"].values()
    at = [where.positions for _, where in circuit.members]
    assert {frozenset(where) for where in at} <= {frozenset(a) for a in (*spans.values(), range(length))}
    own = rows_of(two, "circuit")
    assert own.loc["size", "value"] == sum(set(span) <= where for where in at for span in spans.values())
    assert own.loc["size", "baseline"] == 2 * rows_of(whole, "circuit").loc["size", "baseline"]
    assert own.loc["faithfulness, finding half", "value"] >= 0.9
    assert any(" @ first" in note for note in two.notes)
    # What stands at the first two positions alone is not enough, and the table says so.
    some = experiments.circuit(copier, spans={"first": (0, 1)}, **asked)
    assert "At these positions all edges together have 0." in some.notes[-1]


def test_the_halves_do_not_overlap_and_sources_are_of_their_own(copier):
    (subject,) = subjects(copier, Examples(samples=N, seed=SEED))
    first, second = split_halves(subject, "resample")
    assert torch.equal(torch.cat([first[0], second[0]]), subject.tokens)
    for at, (base, source, batch) in enumerate((first, second)):
        assert torch.equal(source, base[derangement(len(base), SEED + at)])
        assert torch.equal(batch.tokens, base)
    negated = subject.task.patch_sources(subject.batch)["negated"].tokens[N // 2 :]
    assert torch.equal(split_halves(subject, "negated")[1][1], negated)
    # By default another matrix, with the same entries hidden.
    base, source, _ = split_halves(subject, None)[0]
    assert torch.equal(source == 0, base == 0)
    assert not torch.equal(source, base)


def addition(folder):
    task = tasks.get("modular-addition", p=7)
    model = task.build_model(0, task.Model(n_layers=1, n_heads=2, d_model=8))
    return str(save_checkpoint(folder / "addition", model, task, step=1))


def test_a_metric_without_a_gradient_is_ranked_by_one_that_has(tmp_path):
    (subject,) = subjects(addition(tmp_path), Examples(samples=8))
    assert metrics_to_test_and_rank(subject, None) == ("accuracy", "loss")
    assert metrics_to_test_and_rank(subject, "loss") == ("loss", "loss")


def test_without_a_gap_there_is_no_circuit(tmp_path, task, capsys):
    model = task.build_model(0, task.Model(n_layers=1, n_heads=2, d_model=8))
    with torch.no_grad():
        model.W_E.zero_()
    folder = str(save_checkpoint(tmp_path / "c", model, task, step=3))
    result = experiments.circuit(folder, samples=8, random=2)
    own = rows_of(result, "circuit")
    assert math.isnan(own.loc["size", "value"])
    assert own.loc["gap", "value"] == 0
    assert "faithfulness" not in own.index
    assert result.data["circuits"] == {}
    assert main(["circuit", "--ckpt", folder, "--samples", "8", "--random", "2"]) == 0
    assert "no gap" in capsys.readouterr().out
    with pytest.raises(UserError, match="there is no circuit"):
        experiments.circuit(folder, samples=8, random=2, write=tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_what_is_written_is_kept(copier, folders, tmp_path, found, capsys):
    file = tmp_path / "made" / "circuit.json"
    asked = [f"--{name}={value}" for name, value in {"method": "exact", "random": 3, **SHARED}.items()]
    assert main(["circuit", "--ckpt", copier, "--no-curve", "--write", str(file), *asked]) == 0
    assert capsys.readouterr().err.endswith(f"wrote {file}\n")
    assert [circuits.read(file)] == [*found.data["circuits"].values()]
    kept_again = experiments.circuit([copier, folders[0]], keep=file, random=3, curve=False, **SHARED)
    own = rows_of(found, "circuit")
    again = kept_again.frame[(kept_again.frame["ref"] == copier) & (kept_again.frame["variant"] == "circuit")]
    again = again.set_index("metric")
    for metric in ("size", "faithfulness", "mse_observed", "gap", "faithfulness, best of random"):
        assert again.loc[metric, "value"] == pytest.approx(own.loc[metric, "value"], abs=1e-9)
    assert "faithfulness, finding half" not in again.index
    assert kept_again.config["method"] == "given"
