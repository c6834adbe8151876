"""The same variants at several checkpoints, in one call and one table."""

import copy
import gc
import hashlib
import weakref
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, intervene, patch, permute, run, sweep, transplant
from circuits.statistics import holm

NUMBERS = [
    "value",
    "value_ci_low",
    "value_ci_high",
    "baseline",
    "effect",
    "effect_ci_low",
    "effect_ci_high",
    "p_value",
]
SAME = ["variant", "draw", "site", "layer", "head", "metric", "n", "engine", "null_effect"]
FEW = {"draws": 30, "flips": 30}


def metric(output):
    return {"last": output[:, -1].square().sum(-1), "first": output[:, 0, 0]}


def variants(tokens, other_tokens, donor):
    return {
        "mean": ablate.mean("1.0-1", reference=other_tokens),
        "both": (transplant.weights(donor, "mlp"), ablate.zero("0.1")),
        "places": permute.draws(2),
        "path": patch.path("0.1", "1.2", other_tokens),
    }


@pytest.fixture
def three(family, make_model):
    """Three checkpoints of one run: settings alike, weights not."""
    return {label: make_model(seed, family=family) for seed, label in enumerate(("4000", "14000", "50000"))}


def footprint(model):
    # Hashes: pytest takes minutes to show how two long byte strings differ.
    return [
        (id(p), p.data_ptr(), hashlib.sha256(p.detach().numpy().tobytes()).hexdigest())
        for p in model.parameters()
    ]


def test_each_checkpoint_is_what_a_sweep_of_that_model_alone_gives(three, tokens, other_tokens):
    donor = next(iter(three.values()))
    given = variants(tokens, other_tokens, donor)
    model = copy.deepcopy(donor)
    before = footprint(model)
    states = {label: one.state_dict() for label, one in three.items()}
    from_models, from_states = (
        sweep(model, tokens, given, metric=metric, checkpoints=checkpoints, batch_size=5, **FEW)
        for checkpoints in (three, states)
    )
    assert footprint(model) == before
    assert list(dict.fromkeys(from_models.frame["checkpoint"])) == ["4000", "14000", "50000"]
    for label, checkpoint in three.items():
        alone = sweep(checkpoint, tokens, given, metric=metric, batch_size=5, **FEW)
        for together in (from_models, from_states):
            rows = together.frame[together.frame["checkpoint"] == label].reset_index(drop=True)
            for column in NUMBERS:
                np.testing.assert_allclose(rows[column], alone.frame[column], rtol=1e-9, atol=1e-10)
            for column in SAME:
                assert rows[column].equals(alone.frame[column]), column
            clean = together.baseline[together.baseline["checkpoint"] == label]
            np.testing.assert_allclose(clean["value"], alone.baseline["value"], rtol=1e-11)
    values = from_models.frame[from_models.frame["variant"] == "mean"]["value"]
    assert values.nunique() == 6
    # Holm over the whole grid: all variants, metrics and checkpoints.
    np.testing.assert_array_equal(
        from_models.frame["p_adjusted"], holm(from_models.frame["p_value"].to_numpy(dtype=float))
    )
    assert from_models.frame["p_value"].notna().sum() == 4 * 2 * 3


@pytest.mark.parametrize("given", ["functions", "iterator"])
@pytest.mark.parametrize("engine", ["naive", "auto"])
def test_one_is_in_memory_at_a_time(make_model, family, tokens, engine, given):
    model = make_model(0, family, n_layers=3)
    storages, alive = [], []
    learned = {weight.data_ptr() for weight in model.parameters()}  # a bridge has buffers of zeros too

    def state(seed):
        alive.append(sum(one() is not None for one in storages))
        found = {
            name: weight.detach() + 0.01 * seed if weight.data_ptr() in learned else weight.clone()
            for name, weight in model.state_dict().items()
        }
        storages.extend(weakref.ref(weight.untyped_storage()) for weight in found.values())
        return found

    checkpoints = {str(seed): partial(state, seed) for seed in range(4)}
    if given == "iterator":
        checkpoints = ((label, make()) for label, make in checkpoints.items())
    edits = {f"2.{head}": ablate.zero(f"2.{head}") for head in range(3)}
    found = sweep(model, tokens, edits, metric=metric, engine=engine, checkpoints=checkpoints, **FEW)
    assert len(found.frame)
    assert alive == [0] * 4
    assert len(storages) >= 4 * 10


def test_a_buffer_that_differs_is_refused(hooked_only, make_model, tokens):
    """A causal mask is no parameter and is not exchanged."""
    model = make_model(family=hooked_only)
    state = {**model.state_dict(), "blocks.0.attn.mask": torch.ones(6, 6, dtype=torch.bool)}
    with pytest.raises(
        CircuitsError, match=r"blocks\.0\.attn\.mask differs from the model's, and is no parameter"
    ):
        sweep(model, tokens, {"zero": ablate.zero("0.1")}, checkpoints={"a": state})


def test_state_dicts_inside_a_block_that_replaced_weights(three, tokens):
    """They would undo the transplant, and clean passes would see neither."""
    model, donor = three["4000"], three["50000"]
    states = {"b": three["14000"].state_dict()}
    before = footprint(model)
    with intervene(model, transplant.weights(donor, "mlp")):
        with pytest.raises(CircuitsError, match="a block around this sweep has replaced weights") as caught:
            sweep(model, tokens, {"zero": ablate.zero("0.1")}, checkpoints=states)
        model(tokens)
    assert "\n" not in str(caught.value)
    assert footprint(model) == before
    with intervene(model, ablate.zero("0.2")):
        inside = sweep(model, tokens, {"zero": ablate.zero("0.1")}, metric=metric, **FEW, checkpoints=states)
    expected = metric(run(three["14000"], tokens, ablate.zero("0.2"), ablate.zero("0.1")))["last"].mean()
    np.testing.assert_allclose(inside.frame["value"][0], expected, rtol=1e-12)


@pytest.mark.parametrize("how", ["models", "loaders", "pairs"])
def test_models_inside_a_block_that_edits_another_are_refused(three, tokens, how):
    """The block's edits would act in none of them, and every number be that of the models without."""
    model, other = three["4000"], three["14000"]
    given = {
        "models": {"a": model, "b": other},
        "loaders": {"a": lambda: model, "b": lambda: other},
        "pairs": iter([("a", model), ("b", other)]),
    }[how]
    outer, variants = ablate.zero("0.2"), {"zero": ablate.zero("0.1")}
    with intervene(model, outer):
        with pytest.raises(
            CircuitsError, match="checkpoint b: a block around this sweep edits another"
        ) as caught:
            sweep(model, tokens, variants, metric=metric, **FEW, checkpoints=given)
        model(tokens)
    assert "\n" not in str(caught.value)
    both = {"a": model, "b": other}
    with intervene(model, outer), intervene(other, outer):  # each in a block of its own
        inside = sweep(model, tokens, variants, metric=metric, **FEW, checkpoints=both).frame
    expected = [
        metric(run(one, tokens, outer, variants["zero"]))["last"].mean().item() for one in both.values()
    ]
    np.testing.assert_allclose(inside[inside["metric"] == "last"]["value"], expected, rtol=1e-12)


@pytest.mark.parametrize("how", ["one parameter", "a view"])
@pytest.mark.parametrize("which", ["blocks.0.attn.W_Q", "blocks.1.attn.W_Q"])
def test_checkpoints_that_tied_parameters_cannot_hold_are_refused(
    make_model, hooked_only, tokens, how, which
):
    """One of the two would be lost: alone, later, and as the first."""
    model, variants = make_model(0), {"0.1": ablate.zero("0.1")}
    weight = model.blocks[0].attn.W_Q
    model.blocks[1].attn.W_Q = weight if how == "one parameter" else torch.nn.Parameter(weight.data)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    torn = {**whole, which: 1.5 * whole[which]}
    expected = sweep(model, tokens, variants).frame["effect"].tolist()
    found = sweep(model, tokens, variants, checkpoints=dict.fromkeys("abc", whole)).frame
    assert found["effect"].tolist() == pytest.approx(3 * expected, rel=1e-9)
    for checkpoints in ({"a": torn}, {"a": whole, "b": torn}, {"a": whole, "b": whole, "c": torn}):
        with pytest.raises(CircuitsError, match="is tied to another parameter of the model, and they differ"):
            sweep(model, tokens, variants, checkpoints=checkpoints)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


@dataclass
class Loaded:
    """A checkpoint as a loader returns it."""

    ref: str
    model: torch.nn.Module


def test_loaded_checkpoints_are_taken_one_at_a_time(make_model, tokens):
    seeds, alive = (0, 1, 2), []

    def loaded():
        for seed in seeds:
            gc.collect()  # a model is part of cycles
            assert [ref() for ref in alive] == [None] * len(alive)
            model = make_model(seed)
            alive.append(weakref.ref(model))
            yield Loaded(f"run@{seed}", model)
            del model

    model, edit = make_model(7), ablate.zero("0.1")
    found = sweep(model, tokens, {"zero": edit}, metric=metric, checkpoints=loaded(), **FEW).frame
    given = {f"run@{seed}": make_model(seed) for seed in seeds}
    expected = sweep(model, tokens, {"zero": edit}, metric=metric, checkpoints=given, **FEW).frame
    assert found["checkpoint"].tolist() == expected["checkpoint"].tolist()
    np.testing.assert_array_equal(found[NUMBERS], expected[NUMBERS])
    by_name = {name: Loaded("other", one) for name, one in given.items()}
    again = sweep(model, tokens, {"zero": edit}, metric=metric, checkpoints=by_name, **FEW).frame
    np.testing.assert_array_equal(again[NUMBERS], expected[NUMBERS])
    with pytest.raises(CircuitsError, match=r"got \w+, which has no \.ref and \.model"):
        sweep(model, tokens, {"zero": edit}, metric=metric, checkpoints=[model], **FEW)
