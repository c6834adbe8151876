"""``interp-run modular progress``: against numpy, forwards by hand and the library's interventions, on small models."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tasks
from circuits import ablate, fourier
from circuits import run as run_model
from interp_tasks import experiments, load_checkpoint
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS
from interp_tasks.papers.input_grid_and_answers import GridInputs
from interp_tasks.papers.nanda import grokking_phases as phases
from interp_tasks.papers.nanda import progress_experiment as progress
from interp_tasks.papers.nanda.progress_measures import GridModel, restricted_loss_rows, split_rows
from tests.interp_tasks.rows import row_of

P = 7
#: Of the model of addition, whose key frequencies it makes ``KEYS``.
RULE, KEYS = "of-largest=0.9", [1, 2]
STEPS = (0, 2, 4, 6)


@pytest.fixture(scope="module")
def addition():
    return tasks.get("modular-addition", p=P, train_fraction=0.5, validation_size=5)


@pytest.fixture(scope="module")
def primes():
    return tasks.get("miiii", p=P, primes=[2, 3, 5], train_fraction=0.5, validation_size=5)


def scaled(task, **settings):
    """A random model whose every part moves the output."""
    model = task.build_model(0, task.Model(d_model=8, n_heads=2, d_mlp=12, **settings))
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=stream) * 0.5)
    return model


@pytest.fixture(scope="module")
def models(addition, primes):
    return {task.name: scaled(task) for task in (addition, primes)}


@pytest.fixture(scope="module")
def folders(addition, primes, models, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        task.name: str(save_checkpoint(root / task.name, models[task.name], task, step=3))
        for task in (addition, primes)
    }


@pytest.fixture(scope="module")
def results(folders):
    return {name: experiments.progress(folder, rule=RULE) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def run(addition, tmp_path_factory):
    from interp_tasks import train

    config = {"steps": 6, "checkpoint_every": 2, "learning_rate": 0.05, "eval_samples": 8}
    config |= {"checkpoint_at": list(STEPS)}
    settings = {"d_model": 8, "n_heads": 2, "d_mlp": 12}
    return str(train(addition, out=tmp_path_factory.mktemp("runs") / "run", settings=settings, config=config))


def value(frame, variant, metric, intervention="none", split="grid", column="value"):
    return row_of(frame, variant=variant, metric=metric, intervention=intervention, split=split)[column]


def keys_of(result):
    (followed,) = result.data["runs"].values()
    return followed.keys


def cross_entropy(logits, answers):
    logits = np.asarray(logits, dtype=float)
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), answers]


def without(logits, r, q, keys):
    """Logits less their regression on the waves; the means stay."""
    waves = [f(2 * np.pi * k * r / q) for k in keys for f in (np.cos, np.sin)]
    waves = np.stack([w - w.mean() for w in waves], 1)
    return logits - waves @ np.linalg.lstsq(waves, logits - logits.mean(0), rcond=None)[0]


def grid_of(task, model, name):
    """Tokens, logits of one answer, answers, by hand."""
    tokens = torch.cartesian_prod(torch.arange(P), torch.arange(P))
    tokens = torch.cat([tokens, torch.full((P * P, 1), P)], 1)
    logits = run_model(model, tokens)[:, -1].double().numpy()
    if task.name == "modular-addition":
        return tokens, logits, (tokens[:, 0] + tokens[:, 1]).numpy() % P, P
    q = int(name.removeprefix("mod_"))
    first = {2: 0, 3: 2, 5: 5}[q]
    return tokens, logits[:, first : first + q], (tokens[:, 0] + P * tokens[:, 1]).numpy() % q, q


@pytest.mark.parametrize(("task", "name", "keys"), [("addition", "sum", KEYS), ("primes", "mod_5", [1, 2])])
def test_losses_against_numpy(task, name, keys, request, models, results):
    task = request.getfixturevalue(task)
    frame = results[task.name].frame
    assert tuple(frame.columns) == COLUMNS
    tokens, logits, r, q = grid_of(task, models[task.name], name)
    if task.name == "miiii":
        keys = keys_of(results[task.name])[name]
    left = without(logits, r, q, keys)
    fitted = logits - left + logits.mean(0)
    place = {tuple(row): index for index, row in enumerate(tokens.tolist())}
    for split in ("grid", "train", "test"):
        rows = range(P * P)
        if split != "grid":
            rows = [place[tuple(row)] for row in task.sample(None, split=split).tokens.tolist()]
        rows = list(rows)
        clean = cross_entropy(logits[rows], r[rows]).mean()
        assert value(frame, name, "loss", split=split) == pytest.approx(clean, rel=1e-5)
        for said, edited in (("restricted to key frequencies", fitted), ("key frequencies excluded", left)):
            expected = cross_entropy(edited[rows], r[rows]).mean()
            assert value(frame, name, "loss", said, split) == pytest.approx(expected, rel=1e-5)
            assert value(frame, name, "loss", said, split, "baseline") == pytest.approx(clean, rel=1e-5)
            right = (edited[rows].argmax(1) == r[rows]).mean()
            assert value(frame, name, "accuracy", said, split) == pytest.approx(right)
    train = [place[tuple(row)] for row in task.sample(None, split="train").tokens.tolist()]
    assert set(frame.loc[frame["split"] == "train", "n"]) == {len(train)}


@pytest.fixture(scope="module")
def by_hand(addition, models, results):
    """The model of addition, its table, and what its losses are made of."""
    model = models["modular-addition"]
    tokens, logits, r, _ = grid_of(addition, model, "sum")
    _, seen = run_model(model, tokens, cache=["mlp_post.0"])
    neurons = seen["mlp_post.0"][:, -1].double()
    w_l = (model.W_out[0] @ model.W_U).detach().double()
    clusters = fourier.clusters(fourier.spectrum(neurons, {"a": P, "b": P}))
    frame = results["modular-addition"].frame

    def check(said, expected, variant="sum", rel=1e-5):
        """The loss of a row is that of these logits ``[input class]``."""
        found = value(frame, variant, "loss", said)
        assert found == pytest.approx(cross_entropy(expected, r).mean(), rel=rel), said

    made = {"model": model, "tokens": tokens, "logits": logits, "r": r, "neurons": neurons, "w_l": w_l}
    return SimpleNamespace(**made, frame=frame, clusters=clusters, check=check)


def frequencies_edited(model, tokens, keys, **how):
    edit = ablate.frequencies("mlp_post.0", keys, (0, 1), P, grid=tokens, positions=[-1], **how)
    return run_model(model, tokens, edit)[:, -1].numpy()


def test_neurons_as_ablate_frequencies_has_it(by_hand):
    """Frequencies of the neurons removed and kept, against the library's own intervention in the whole model."""
    for said, how in (
        ("neurons: key frequencies alone", {}),
        ("neurons: waves of the answer alone", {"directions": "sum"}),
    ):
        by_hand.check(said, frequencies_edited(by_hand.model, by_hand.tokens, KEYS, keep=True, **how))
    for key in KEYS:
        edited = frequencies_edited(by_hand.model, by_hand.tokens, [key])
        by_hand.check("neurons: without one key frequency", edited, f"sum, frequency {key}")
    is_of_neurons = by_hand.frame["intervention"].str.startswith("neurons")
    assert set(by_hand.frame.loc[is_of_neurons, "engine"]) == {"linear"}


def test_the_map_against_numpy(by_hand):
    """W_L by a plain DFT; projections on and off its directions by hand."""
    model, frame, weights, r = by_hand.model, by_hand.frame, by_hand.w_l.numpy(), by_hand.r
    power = (np.abs(np.fft.fft(weights, axis=1)) ** 2).sum(0)
    residual = np.sqrt((power[0] + power[3] + power[4]) / power.sum())
    assert value(frame, "sum", "residual of W_L") == pytest.approx(residual)
    embedding = np.fft.fft(model.W_E[:P].detach().double().numpy(), axis=0)
    norms = np.linalg.norm(embedding[1 : P // 2 + 1], axis=1)
    assert value(frame, "sum", "frequencies of W_E") == (norms > norms.max() / 4).sum()
    neurons = by_hand.neurons.numpy()
    c = 2 * np.pi * np.arange(P) / P
    rows = np.stack([f(k * c) * np.sqrt(2 / P) @ weights.T for k in KEYS for f in (np.cos, np.sin)])
    projected, along = neurons @ rows[1], np.sin(2 * np.pi * r / P)
    slope, intercept = np.polyfit(along, projected, 1)
    explained = 1 - np.var(projected - slope * along - intercept) / np.var(projected)
    wave = "sin of sum, frequency 1"
    assert value(frame, wave, "variance explained by the wave") == pytest.approx(explained)
    on = neurons @ np.linalg.pinv(rows) @ rows
    for said, kept in (("on the directions of W_L alone", on), ("off the directions of W_L", neurons - on)):
        by_hand.check(f"neurons: {said}", by_hand.logits + (kept - neurons) @ weights)


def test_clusters_of_neurons(by_hand):
    """A neuron of a cluster keeps its mean and the block of its frequency, the others all they have; the power of a
    cluster's columns of W_L in its own frequency is that of numpy's FFT over the classes.
    """
    found, neurons, kept = by_hand.clusters, by_hand.neurons, by_hand.neurons.clone()
    power = np.abs(np.fft.fft(by_hand.w_l.numpy(), axis=1)) ** 2
    assert found.sizes, "no neuron is in a cluster"
    for key in found.sizes:
        members = found.neurons(key)
        block = fourier.components(fourier.Grid({"a": P, "b": P}), [key])
        kept[:, members] = neurons[:, members].mean(0) + block @ (block.T @ neurons[:, members])
        share = power[members.numpy()][:, [key, P - key]].sum() / power[members.numpy()].sum()
        metric = "power of W_L in the frequency of its neurons"
        assert value(by_hand.frame, f"sum, frequency {key}", metric) == pytest.approx(share)
    edited = by_hand.logits + ((kept - neurons) @ by_hand.w_l).numpy()
    by_hand.check("neurons: own frequency of each alone", edited)


def test_frequencies_of_the_logits(by_hand):
    def projected(keys):
        block = fourier.components(fourier.Grid({"a": P, "b": P}), keys).numpy()
        return block @ (block.T @ by_hand.logits)

    by_hand.check("logits: key frequencies alone", by_hand.logits.mean(0) + projected(KEYS))
    for key in KEYS:
        about = f"sum, frequency {key}"
        by_hand.check("logits: without one key frequency", by_hand.logits - projected([key]), about)


def read_out(model, stream):
    """The logits that a stream at "=" makes without the MLP, in numpy."""
    return (stream @ model.W_U.detach() + model.b_U.detach()).numpy()


def mlp(model, stream):
    w_in, w_out, b_in, b_out = (
        getattr(model, name)[0].detach() for name in ("W_in", "W_out", "b_in", "b_out")
    )
    return torch.relu(stream @ w_in + b_in) @ w_out + b_out


def test_waves_in_the_place_of_attention(by_hand):
    """By hand: every head's attention regressed on its best wave, z and all after it made anew from v."""
    model, tokens = by_hand.model, by_hand.tokens
    _, seen = run_model(model, tokens, cache=["pattern.0", "v.0", "resid_pre.0"])
    pattern = seen["pattern.0"][:, :, -1].double().numpy()
    a, b = tokens[:, 0].numpy(), tokens[:, 1].numpy()
    mixed = np.zeros((P * P, 8))
    for head in range(2):
        attention, best = pattern[:, head, 0], None
        for k in (1, 2, 3):
            turn = 2 * np.pi * k / P
            design = np.stack(
                [np.ones(P * P), np.cos(turn * a) - np.cos(turn * b), np.sin(turn * a) - np.sin(turn * b)], 1
            )
            made = design @ np.linalg.lstsq(design, attention, rcond=None)[0]
            if best is None or ((made - attention) ** 2).sum() < ((best - attention) ** 2).sum():
                best = made
        itself = pattern[:, head, 2].mean()
        weights = np.stack([best, 1 - itself - best, np.full(P * P, itself)], 1)
        z = np.einsum("ik,ikd->id", weights, seen["v.0"][:, :, head].double().numpy())
        mixed += z @ model.W_O[0, head].detach().double().numpy()
    stream = torch.tensor(seen["resid_pre.0"][:, -1].double().numpy() + mixed).float() + model.b_O[0].detach()
    by_hand.check(
        "attention: waves of the digits alone", read_out(model, stream + mlp(model, stream)), rel=1e-4
    )
    clean, edited = (
        value(by_hand.frame, "sum", "loss", said) for said in ("none", "attention: waves of the digits alone")
    )
    assert abs(edited - clean) > 0.005 * clean


def test_skips_against_a_forward_by_hand(by_hand):
    model = by_hand.model
    _, seen = run_model(model, by_hand.tokens, cache=["resid_pre.0", "attn_out.0"])
    before, attention = (seen[site][:, -1].detach() for site in ("resid_pre.0", "attn_out.0"))
    # Heads are zeroed at z: the output's bias stays.
    bare, both = before + model.b_O[0].detach(), before + attention
    streams = {
        "attention zeroed": bare + mlp(model, bare),
        "way around attention zeroed": attention + mlp(model, attention),
        "way around MLP zeroed": mlp(model, both),
        "way around MLP at its mean": mlp(model, both) + both.mean(0),
    }
    for said, stream in streams.items():
        by_hand.check(said, read_out(model, stream), rel=1e-4)


def test_phases_of_curves_made_by_hand():
    def rows(**curves):
        steps = (0, 100, 200, 300, 400, 500)
        named = {
            name.replace("_", " "): dict(zip(steps, values, strict=True)) for name, values in curves.items()
        }
        return {(row["intervention"], row["metric"]): row for row in phases.phase_rows("sum", named)}

    train, test = [10.0, 5.0, 0.0, 0.0, 0.0, 0.0], [10.0, 20.0, 20.0, 20.0, 10.0, 0.0]
    # An excluded loss sinks before it rises: its way begins where it is least.
    found = rows(
        train_loss=train, test_loss=test, sum=[0.0, 0, 2, 4, 4, 14], excluded_loss=[5.0, 1, 0, 4, 8, 8]
    )
    ends = [row["value"] for (what, _), row in found.items() if what == "boundary of phases"]
    assert ends == pytest.approx([180, 320, 480])
    changed = {phase: found[phase, "change of sum"] for phase in ("circuit formation", "cleanup")}
    assert [changed[phase]["baseline"] for phase in changed] == pytest.approx([1.6, 4])
    assert [changed[phase]["value"] for phase in changed] == pytest.approx([2.4, 8])
    assert found["half of its way", "step: excluded loss"]["value"] == pytest.approx(300)
    assert found["half of its way", "step: test loss"]["value"] == pytest.approx(400)
    # Generalised before it is memorised: there is no circuit formation between.
    assert np.isnan(
        rows(train_loss=test, test_loss=train)["circuit formation", "change of test loss"]["value"]
    )
    assert phases.phase_boundaries({"train loss": {0: 1.0}, "test loss": {0: 1.0}}) == {}


def test_keys_are_those_of_the_last_checkpoint_stored(run):
    """Also where only earlier ones are looked at; curves of four and more have phases."""
    last = experiments.progress(f"{run}@last", rule="of-largest=0.43", kinds=["losses"])
    first = experiments.progress(f"{run}@0", rule="of-largest=0.43", kinds=["losses"])
    assert keys_of(first) == keys_of(last)
    model = load_checkpoint(f"{run}@last").model
    weights = model.W_out[0] @ model.W_U
    own = fourier.key_frequencies(fourier.spectrum(weights, axis=1), "of-largest", 0.43).keys
    assert keys_of(last) == {"sum": own}
    assert "boundary of phases" not in set(first.frame["intervention"])


def test_curves_over_a_run(run):
    result = experiments.progress([f"{run}@{step}" for step in STEPS])
    frame = result.frame
    assert list(frame["step"].unique()) == list(STEPS)
    assert set(frame.loc[frame["intervention"] == "boundary of phases", "step"]) == {STEPS[-1]}
    assert set(frame.loc[frame["intervention"] == "attention zeroed", "step"]) == {STEPS[-1]}
    (followed,) = result.data["runs"].values()
    curves = followed.curves
    excluded = frame[(frame["intervention"] == "key frequencies excluded") & (frame["metric"] == "loss")]
    excluded = excluded[excluded["split"] == "train"].set_index("step")["value"].to_dict()
    assert curves["sum"]["excluded loss"] == excluded
    drawn = {trace.name: trace for trace in result.plot().data}
    assert list(drawn["excluded loss"].y) == pytest.approx(list(excluded.values()))


@pytest.mark.parametrize("form", ["indices", "mask", "file"])
def test_a_checkpoint_that_does_not_say_what_it_was_trained_on(addition, models, form, capsys, tmp_path):
    """Losses over stated training inputs, by hand; without a statement over all inputs alone."""
    folder = str(save_checkpoint(tmp_path / "foreign", models["modular-addition"]))
    settings = {
        "task": "modular-addition",
        "task_config": {"p": P, "train_fraction": 0.5, "validation_size": 5},
    }
    frame = experiments.progress(folder, kinds="losses", **settings).frame
    assert set(frame["split"]) == {"grid"}
    indices = np.array([3, 0, 48, 17, 20, 9, 31])
    mask = np.zeros((P, P), dtype=bool)
    mask.flat[indices] = True
    np.save(tmp_path / "train.npy", indices)
    given = {"indices": indices, "mask": mask, "file": tmp_path / "train.npy"}[form]
    found = experiments.progress(folder, kinds="losses", train=given, **settings).frame
    _, logits, r, _ = grid_of(addition, models["modular-addition"], "sum")
    losses = cross_entropy(logits, r)
    assert value(found, "sum", "loss", split="train") == pytest.approx(losses[indices].mean())
    assert value(found, "sum", "loss", split="test") == pytest.approx(np.delete(losses, indices).mean())
    assert set(found.loc[found["split"] == "test", "n"]) == {P * P - 7}
    assert progress.view_columns(progress.view_rows(found))[-1].header == "test"


@pytest.mark.parametrize("kind", ["restricted to key frequencies", "cosines of key frequencies"])
def test_held_out_logits_against_numpy(kind, addition, by_hand):
    """Each tenth of a split's inputs by a regression on the others of that split."""
    logits, r = by_hand.logits, by_hand.r
    for split in ("train", "test"):
        rows = split_rows(GridInputs.of(addition, "progress"))[split]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        losses = []
        for part in np.array_split(rows[order].numpy(), 10):
            fit = np.setdiff1d(rows.numpy(), part)
            if kind.startswith("restricted"):
                angle = 2 * np.pi * np.outer(r, KEYS) / P
                design = np.concatenate([np.ones((P * P, 1)), np.cos(angle), np.sin(angle)], 1)
                edited = design[part] @ np.linalg.lstsq(design[fit], logits[fit], rcond=None)[0]
            else:
                difference = (r[:, None] - np.arange(P)) % P
                angle = 2 * np.pi * difference[..., None] * np.array(KEYS) / P
                design = np.concatenate([np.ones((P * P, P, 1)), np.cos(angle)], 2)
                flat = design[fit].reshape(-1, 3), logits[fit].ravel()
                edited = design[part] @ np.linalg.lstsq(*flat, rcond=None)[0]
            losses.append(cross_entropy(edited, r[part]))
        found = value(by_hand.frame, "sum", "loss", f"{kind}, held out", split)
        assert found == pytest.approx(np.concatenate(losses).mean(), rel=1e-6)


def test_memorised_answers_are_not_in_held_out_logits():
    """Right on the training inputs, arbitrary on the others: fitted on all inputs, the test accuracy is 1."""
    p = 31
    task = tasks.get("modular-addition", p=p, train_fraction=0.5, validation_size=5)
    inputs = GridInputs.of(task, "progress")
    splits, (answer,) = split_rows(inputs), inputs.answers.values()
    logits = torch.randn(p * p, p, generator=torch.Generator().manual_seed(0)).double()
    logits[splits["train"], answer.sum.remainders[splits["train"]]] += 20
    rows = [*restricted_loss_rows(GridModel(None, inputs, splits, logits, logits, {}), answer, range(1, 16))]

    def accuracy(intervention, split):
        (found,) = (
            row["value"]
            for row in rows
            if (row["intervention"], row["metric"], row.get("split")) == (intervention, "accuracy", split)
        )
        return found

    assert accuracy("restricted to key frequencies", "test") == 1
    assert accuracy("cosines of key frequencies", "test") == 1
    for kind in ("restricted to key frequencies", "cosines of key frequencies"):
        assert accuracy(f"{kind}, held out", "test") < 0.1
        assert accuracy(f"{kind}, held out", "train") == 1
