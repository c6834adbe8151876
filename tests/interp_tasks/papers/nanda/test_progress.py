"""``interp-run modular progress``: against numpy, forwards by hand and the library's interventions, on small models."""

import numpy as np
import pytest
import torch

import tasks
from circuits import ablate, fourier
from circuits import run as run_model
from interp_tasks import experiments, load_checkpoint
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS
from interp_tasks.papers.grid import GridInputs
from interp_tasks.papers.nanda import phases
from interp_tasks.papers.nanda.losses import GridModel, loss_rows, splits_of
from interp_tasks.papers.nanda.mechanism import best_waves, operand_waves

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


def value(frame, variant, metric, intervention="none", split="grid", column="value", **where):
    chosen = (frame["variant"] == variant) & (frame["metric"] == metric) & (frame["split"] == split)
    chosen &= frame["intervention"] == intervention
    for name, wanted in where.items():
        chosen &= (frame[name] == wanted).fillna(False).astype(bool)
    (found,) = frame.loc[chosen, column]
    return found


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


def test_neurons_as_ablate_frequencies_has_it(addition, models, results):
    """Frequencies of the neurons removed and kept, against the library's own intervention in the whole model."""
    model, frame = models["modular-addition"], results["modular-addition"].frame
    tokens, _, r, _ = grid_of(addition, model, "sum")

    def loss(keys, **how):
        edit = ablate.frequencies("mlp_post.0", keys, (0, 1), P, grid=tokens, positions=[-1], **how)
        return cross_entropy(run_model(model, tokens, edit)[:, -1].numpy(), r).mean()

    for said, keys, how in (
        ("neurons: key frequencies alone", KEYS, {"keep": True}),
        ("neurons: waves of the answer alone", KEYS, {"keep": True, "directions": "sum"}),
    ):
        assert value(frame, "sum", "loss", said) == pytest.approx(loss(keys, **how), rel=1e-5)
    for key in KEYS:
        found = value(frame, f"sum, frequency {key}", "loss", "neurons: without one key frequency")
        assert found == pytest.approx(loss([key]), rel=1e-5)
    assert set(frame.loc[frame["intervention"].str.startswith("neurons"), "engine"]) == {"linear"}


def test_a_norm_before_the_read_out_takes_the_long_way(addition, tmp_path):
    model = scaled(addition, normalization="LN")
    folder = str(save_checkpoint(tmp_path / "c", model, addition))
    result = experiments.progress(folder, kinds=["neurons"])
    frame, key = result.frame, keys_of(result)["sum"][0]
    assert set(frame.loc[frame["intervention"].str.startswith("neurons"), "engine"]) == {"naive"}
    tokens, _, r, _ = grid_of(addition, model, "sum")
    edit = ablate.frequencies("mlp_post.0", [key], (0, 1), P, grid=tokens, positions=[-1])
    expected = cross_entropy(run_model(model, tokens, edit)[:, -1].numpy(), r).mean()
    found = value(frame, f"sum, frequency {key}", "loss", "neurons: without one key frequency")
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_map_against_numpy(addition, models, results):
    """W_L by a plain DFT; projections on and off its directions by hand."""
    model, frame = models["modular-addition"], results["modular-addition"].frame
    tokens, logits, r, _ = grid_of(addition, model, "sum")
    weights = (model.W_out[0] @ model.W_U).detach().double().numpy()  # [neuron, class]
    spectrum = np.fft.fft(weights, axis=1) / np.sqrt(P)
    power = (np.abs(spectrum) ** 2).sum(0)
    residual = np.sqrt((power[0] + power[3] + power[4]) / power.sum())
    assert value(frame, "sum", "residual of W_L") == pytest.approx(residual)
    embedding = np.fft.fft(model.W_E[:P].detach().double().numpy(), axis=0)
    norms = np.linalg.norm(embedding[1 : P // 2 + 1], axis=1)
    assert value(frame, "sum", "frequencies of W_E") == (norms > norms.max() / 4).sum()
    _, seen = run_model(model, tokens, cache=["mlp_post.0"])
    neurons = seen["mlp_post.0"][:, -1].double().numpy()
    c = 2 * np.pi * np.arange(P) / P
    rows = np.stack([f(k * c) * np.sqrt(2 / P) @ weights.T for k in KEYS for f in (np.cos, np.sin)])
    projected, along = neurons @ rows[1], np.sin(2 * np.pi * r / P)
    slope, intercept = np.polyfit(along, projected, 1)
    explained = 1 - np.var(projected - slope * along - intercept) / np.var(projected)
    wave = "sin of sum, frequency 1"
    assert value(frame, wave, "variance explained by the wave") == pytest.approx(explained)
    on = neurons @ np.linalg.pinv(rows) @ rows
    for said, kept in (("on the directions of W_L alone", on), ("off the directions of W_L", neurons - on)):
        expected = cross_entropy(logits + (kept - neurons) @ weights, r).mean()
        assert value(frame, "sum", "loss", f"neurons: {said}") == pytest.approx(expected, rel=1e-5)


def test_neurons_by_their_own_frequency(addition, models, results):
    """A neuron of a cluster keeps its mean and the block of its frequency, the others all they have."""
    model, frame = models["modular-addition"], results["modular-addition"].frame
    tokens, logits, r, _ = grid_of(addition, model, "sum")
    _, seen = run_model(model, tokens, cache=["mlp_post.0"])
    neurons = seen["mlp_post.0"][:, -1].double()
    found = fourier.clusters(fourier.spectrum(neurons, {"a": P, "b": P}))
    kept = neurons.clone()
    for neuron, at in enumerate(found.assigned.tolist()):
        if at >= 0:
            block = fourier.components(fourier.Grid({"a": P, "b": P}), [found.labels[at]])
            kept[:, neuron] = neurons[:, neuron].mean() + block @ (block.T @ neurons[:, neuron])
    assert found.sizes, "no neuron is in a cluster"
    weights = (model.W_out[0] @ model.W_U).detach().double()
    expected = cross_entropy(logits + ((kept - neurons) @ weights).numpy(), r).mean()
    assert value(frame, "sum", "loss", "neurons: own frequency of each alone") == pytest.approx(
        expected, rel=1e-5
    )


def test_frequencies_of_the_logits_by_a_transform_over_both_digits(addition, models, results):
    """On the complete grid the block of k is what numpy's FFT has at (±k or 0, ±k or 0), the constant apart."""
    frame = results["modular-addition"].frame
    _, logits, r, _ = grid_of(addition, models["modular-addition"], "sum")
    spectrum = np.fft.fft2(logits.reshape(P, P, P), axes=(0, 1))
    places = np.arange(P)

    def without_blocks(keys):
        gone = np.zeros((P, P), dtype=bool)
        for key in keys:
            here = np.isin(places, [0, key, P - key])
            gone |= here[:, None] & here
        gone[0, 0] = False
        return np.fft.ifft2(spectrum * ~gone[:, :, None], axes=(0, 1)).real.reshape(P * P, P)

    for said, edited in (("logits: key frequencies alone", logits - without_blocks(KEYS) + logits.mean(0)),):
        expected = cross_entropy(edited, r).mean()
        assert value(frame, "sum", "loss", said) == pytest.approx(expected, rel=1e-5), said
    for key in KEYS:
        expected = cross_entropy(without_blocks([key]), r).mean()
        found = value(frame, f"sum, frequency {key}", "loss", "logits: without one key frequency")
        assert found == pytest.approx(expected, rel=1e-5)


def test_what_a_cluster_writes(addition, models, results):
    """The power of its neurons' columns of W_L in its own frequency, by numpy's FFT over the classes."""
    model, frame = models["modular-addition"], results["modular-addition"].frame
    tokens, _, _, _ = grid_of(addition, model, "sum")
    _, seen = run_model(model, tokens, cache=["mlp_post.0"])
    found = fourier.clusters(fourier.spectrum(seen["mlp_post.0"][:, -1].double(), {"a": P, "b": P}))
    power = np.abs(np.fft.fft((model.W_out[0] @ model.W_U).detach().double().numpy(), axis=1)) ** 2
    metric = "power of W_L in the frequency of its neurons"
    assert (frame["metric"] == metric).sum() == len(found.sizes) > 0
    for key in found.sizes:
        mine = power[found.neurons(key).numpy()]
        share = mine[:, [key, P - key]].sum() / mine.sum()
        assert value(frame, f"sum, frequency {key}", metric) == pytest.approx(share)


def test_waves_in_the_place_of_attention(addition, models, results):
    """By hand: every head's attention regressed on its best wave, z and all after it made anew from v."""
    model, frame = models["modular-addition"], results["modular-addition"].frame
    tokens, _, r, _ = grid_of(addition, model, "sum")
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
    w_in, w_out, w_u = (weight.detach() for weight in (model.W_in[0], model.W_out[0], model.W_U))
    stream = stream + torch.relu(stream @ w_in + model.b_in[0].detach()) @ w_out + model.b_out[0].detach()
    expected = cross_entropy((stream @ w_u + model.b_U.detach()).numpy(), r).mean()
    found = value(frame, "sum", "loss", "attention: waves of the digits alone")
    assert found == pytest.approx(expected, rel=1e-4)
    clean = value(frame, "sum", "loss")
    assert abs(found - clean) > 0.005 * clean


def test_skips_against_a_forward_by_hand(addition, models, results):
    model, frame = models["modular-addition"], results["modular-addition"].frame
    tokens, _, r, _ = grid_of(addition, model, "sum")
    sites = ["resid_pre.0", "attn_out.0", "mlp_post.0"]
    _, seen = run_model(model, tokens, cache=sites)
    before, attention = (seen[site][:, -1].detach() for site in sites[:2])
    w_in, w_out, w_u = (weight.detach() for weight in (model.W_in[0], model.W_out[0], model.W_U))
    b_in, b_out, b_u = (weight.detach() for weight in (model.b_in[0], model.b_out[0], model.b_U))

    def mlp(stream):
        return torch.relu(stream @ w_in + b_in) @ w_out + b_out

    b_o = model.b_O[0].detach()
    streams = {
        # Heads are zeroed at z: the output's bias stays.
        "attention zeroed": before + b_o + mlp(before + b_o),
        "way around attention zeroed": attention + mlp(attention),
        "way around MLP zeroed": mlp(before + attention),
        "way around MLP at its mean": mlp(before + attention) + (before + attention).mean(0),
    }
    for said, stream in streams.items():
        expected = cross_entropy((stream @ w_u + b_u).numpy(), r).mean()
        assert value(frame, "sum", "loss", said) == pytest.approx(expected, rel=1e-4), said


def test_attention_that_is_a_wave_of_the_digits(addition, primes):
    """Planted patterns: waves of a less those of b; waves of one digit alone; of a prime, with its own coefficients."""
    x = torch.cartesian_prod(torch.arange(P), torch.arange(P)).double()
    w = 2 * np.pi / P
    both = (
        0.5
        + 0.1 * ((2 * w * x[:, 0]).cos() - (2 * w * x[:, 1]).cos())
        + 0.2 * ((2 * w * x[:, 0]).sin() - (2 * w * x[:, 1]).sin())
    )
    one = 0.5 + 0.3 * (3 * w * x[:, 1]).sin()
    prime = 0.5 + 0.1 * ((2 * np.pi / 5 * x[:, 0]).cos() - (2 * np.pi / 5 * (P % 5) * x[:, 1]).cos())
    for task, name, expected in ((addition, "sum", {0: 1, 1: 0.5}), (primes, "mod_5", {2: 1})):
        answer = GridInputs.of(task, "progress").answers[name]
        found, _ = best_waves(operand_waves(answer), torch.stack([both, one, prime], 1))
        # Half of a fit with opposite signs is not there in attention to one digit alone.
        assert {head: found[head] for head in expected} == pytest.approx(expected)


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
    assert phases.boundaries({"train loss": {0: 1.0}, "test loss": {0: 1.0}}) == {}


def test_keys_are_those_of_the_last_checkpoint_stored(run):
    """Also where only earlier ones are looked at; curves of four and more have phases."""
    last = experiments.progress(f"{run}@last", rule="of-largest=0.43", kinds=["losses"])
    first = experiments.progress(f"{run}@0", rule="of-largest=0.43", kinds=["losses"])
    assert keys_of(first) == keys_of(last)
    model = load_checkpoint(f"{run}@last").model
    weights = model.W_out[0] @ model.W_U
    own = fourier.key_frequencies(fourier.spectrum(weights, axis=1), fourier.OfLargest(0.43)).keys
    assert keys_of(last) == {"sum": own}
    start = load_checkpoint(f"{run}@0").model
    other = fourier.key_frequencies(
        fourier.spectrum(start.W_out[0] @ start.W_U, axis=1), fourier.OfLargest(0.43)
    ).keys
    assert other != own, "the test needs keys that change"
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
    squares = sum(
        float((w.detach().double() ** 2).sum()) for w in load_checkpoint(f"{run}@4").model.parameters()
    )
    assert curves[""]["sum of squared weights"][4] == pytest.approx(squares)
    (norms,) = (
        np.linalg.norm(np.asarray(fourier.transform(model.W_E[:P].detach())), axis=1)
        for model in [load_checkpoint(f"{run}@4").model]
    )
    assert curves[""]["gini of W_E"][4] == pytest.approx(fourier.gini(norms))
    figure = result.plot()
    titles = [note.text for note in figure.layout.annotations]
    assert titles[:2] == ["run: sum", "run: gini of W_L sum"]
    drawn = {trace.name: trace for trace in figure.data}
    assert list(drawn["excluded loss"].y) == pytest.approx(list(excluded.values()))
    assert "key frequency" in drawn
    assert result.page().html()


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


@pytest.mark.parametrize("kind", ["restricted to key frequencies", "cosines of key frequencies"])
def test_held_out_logits_against_numpy(kind, addition, models, results):
    """Each tenth of a split's inputs by a regression on the others of that split."""
    _, logits, r, _ = grid_of(addition, models["modular-addition"], "sum")
    for split in ("train", "test"):
        rows = splits_of(GridInputs.of(addition, "progress"))[split]
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
        found = value(results["modular-addition"].frame, "sum", "loss", f"{kind}, held out", split)
        assert found == pytest.approx(np.concatenate(losses).mean(), rel=1e-6)


def test_memorised_answers_are_not_in_held_out_logits():
    """Right on the training inputs, arbitrary on the others: fitted on all inputs, the test accuracy is 1."""
    p = 31
    task = tasks.get("modular-addition", p=p, train_fraction=0.5, validation_size=5)
    inputs = GridInputs.of(task, "progress")
    splits, (answer,) = splits_of(inputs), inputs.answers.values()
    logits = torch.randn(p * p, p, generator=torch.Generator().manual_seed(0)).double()
    logits[splits["train"], answer.sum.remainders[splits["train"]]] += 20
    rows = list(loss_rows(GridModel(None, inputs, splits, logits, logits, {}), answer, range(1, 16)))

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
