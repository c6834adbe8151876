"""Weight transplants against a deep copy of the model whose weights are edited by hand."""

import contextlib
import copy
import hashlib
import re

import pytest
import torch

from circuits import CircuitsError, intervene, run, transplant
from circuits.model.hooked_model import HookedModel
from tests.circuits.conftest import weights_of

# Written out here a second time, by HookedTransformer's names.
NAMES = {
    **{part: f"attn.W_{part.upper()} attn.b_{part.upper()}" for part in "qkvo"},
    "mlp": "mlp.W_in mlp.b_in mlp.W_out mlp.b_out",
    **{norm: f"{norm}.w {norm}.b" for norm in ("ln1", "ln2", "ln_embed", "ln_final")},
    "embed": "embed.W_E",
    "pos_embed": "pos_embed.W_pos",
    "unembed": "unembed.W_U unembed.b_U",
}
PARTS = {"qkv": "q k v", "attn": "q k v o", "ln": "ln1 ln2 ln_embed ln_final"}


def names_of(model, component):
    wanted = {name for part in PARTS.get(component, component).split() for name in NAMES[part].split()}
    return {name for name in weights_of(model) if re.sub(r"^blocks\.\d+\.", "", name) in wanted}


def own_names(model):
    """As a state_dict of the model's has them: [embedding, unembedding, its bias]."""
    if type(model).__name__ == "HookedTransformer":
        return "embed.W_E", "unembed.W_U", "unembed.b_U"
    return "embed.weight", "unembed.weight", "unembed.bias"


def another(model, seed=9, scale=0.3):
    """A model of the same shape whose every parameter is different."""
    donor, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in donor.parameters():
        weight.data += scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return donor


def edited_copy(model, donor, names):
    expected, there = copy.deepcopy(model), weights_of(donor)
    for name, weight in weights_of(expected).items():
        if name in names:
            weight.data.copy_(there[name])
    return expected


def footprint(model):
    """The parameters themselves, their bits, and the bits of everything else that is saved.

    Hashes, because pytest takes minutes to show how two long byte strings differ.
    """
    return (
        [(id(weight), weight.data_ptr(), weight.requires_grad) for weight in model.parameters()],
        {
            name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
            for name, value in model.state_dict().items()
        },
    )


def test_every_component_against_an_edited_copy(model, tokens, by_hand, assert_same):
    donor, before, clean = another(model), footprint(model), by_hand(model, tokens)
    theirs = weights_of(donor)
    for component in transplant.COMPONENTS:
        names = names_of(model, component)
        if not names:
            with pytest.raises(CircuitsError, match=f"no weights of '{component}'"):
                transplant.weights(donor, [component])
            continue
        given = transplant.weights(donor, [component])
        assert len(given.describe()["parameters"]) == len(names)
        with intervene(model, given):
            for name, value in weights_of(model).items():
                assert bool((value == theirs[name]).all()) == (name in names)
            found = model(tokens)
        assert_same(found, by_hand(edited_copy(model, donor, names), tokens), clean)
        assert footprint(model) == before


def test_a_weight_that_the_model_holds_as_a_constant_must_be_equal(causal, tokens):
    """On transformer-lens 4.3 an output bias that is not trained is a buffer, which a state_dict lists as well."""
    donor, bias = another(causal), own_names(causal)[2]
    if bias in HookedModel(causal).named_weights():
        holder = _module(causal, bias)
        del holder._parameters[bias.split(".")[-1]]
        holder.register_buffer(bias.split(".")[-1], torch.zeros(11, dtype=torch.float64))
    source = {**donor.state_dict(), bias: torch.zeros(11)}
    assert not bool((run(causal, tokens, transplant.weights(source, "unembed")) == run(causal, tokens)).any())
    with pytest.raises(CircuitsError, match=f"the model has no parameter {bias}"):
        run(causal, tokens, transplant.weights({**source, bias: torch.ones(11)}, "unembed"))


def test_a_tied_parameter_is_refused(make_model, family, tokens):
    model = make_model(family=family, d_vocab=16)
    free, (embed, unembed, _) = copy.deepcopy(model), own_names(model)
    tied = HookedModel(model).named_weights()[embed]
    setattr(_module(model, unembed), unembed.split(".")[-1], tied)
    before = footprint(model)
    for component in ("embed", "unembed"):
        with pytest.raises(CircuitsError, match=rf"{embed} and {unembed} are one parameter") as caught:
            run(model, tokens, transplant.weights(free, component))
        assert "\n" not in str(caught.value)
    assert footprint(model) == before
    assert run(model, tokens, transplant.weights(free, "attn")).shape == (8, 6, 16)


def _module(model, name):
    """Where a parameter lives, whatever wraps it."""
    parameter = HookedModel(model).named_weights()[name]
    return next(m for m in model.modules() if any(x is parameter for x in m.parameters(recurse=False)))


def test_blocks_that_end_in_another_order_leave_the_model_its_own_weights(causal, family, make_model, tokens):
    """As in a notebook, or with generators: the parameter holds what the latest block still open gives it."""
    one, two = (make_model(seed=seed, family=family) for seed in (1, 2))
    before = {name: weight.detach().clone() for name, weight in causal.named_parameters()}
    first = intervene(causal, transplant.weights(one, "qkv"))
    second = intervene(causal, transplant.weights(two, ["qkv", "mlp"]))
    expected = run(causal, tokens, transplant.weights(two, ["qkv", "mlp"]))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert bool((run(causal, tokens) == expected).all())
    second.__exit__(None, None, None)
    assert all(bool((weight == before[name]).all()) for name, weight in causal.named_parameters())


def test_weights_with_nan_are_taken_back(causal, tokens):
    source, before = another(causal).state_dict(), footprint(causal)
    source[own_names(causal)[0]][3] = torch.nan
    run(causal, tokens, transplant.weights(source, "embed"))
    assert footprint(causal) == before


# ---- Weights that somebody else writes inside a block


def whole(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def holds(model, weights):
    return all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())


LEFT = r"inside a block that replaces weights, some of these parameters .* they are left as they are now; load outside"


@contextlib.contextmanager
def left(model, given, message=LEFT):
    """A block that ends with this error, after a body without one."""
    with pytest.raises(CircuitsError, match=message), intervene(model, given):
        yield


def test_weights_that_are_loaded_inside_a_block_are_whole(make_model, family, tokens):
    model, donor, loaded = (make_model(seed=seed, family=family) for seed in (0, 1, 2))
    with left(model, transplant.weights(donor, ["qkv"])):
        model(tokens)
        model.load_state_dict(loaded.state_dict())
    assert holds(model, whole(loaded))
    assert torch.equal(run(model, tokens), run(loaded, tokens))
    # And the next block is like any other.
    before = whole(model)
    with intervene(model, transplant.weights(make_model(seed=3, family=family), ["qkv"])):
        assert not holds(model, before)
    assert holds(model, before)


@pytest.mark.parametrize("way", ["load", "module"])
def test_parameters_that_are_replaced_inside_a_block_are_refused(make_model, family, way):
    """The block acts on those that the model had: what runs after it has no transplant."""
    model, donor, third = (make_model(seed=seed, family=family) for seed in range(3))
    with left(model, transplant.weights(donor, ["mlp"])):
        if way == "load":
            model.load_state_dict(third.state_dict(), assign=True)
        else:
            model.blocks[0] = third.blocks[0]


WRITERS = {
    "an optimiser": lambda weight: torch.optim.SGD([weight], lr=1.0).step(),
    "data": lambda weight: setattr(weight, "data", weight.grad.clone()),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_parameter_that_is_written_to_inside_a_block_stays(make_model, hooked_only, writer):
    """The others of the block come back."""
    model, donor = make_model(0), make_model(1)
    before = whole(model)
    weight = model.blocks[0].attn.W_Q
    weight.grad = torch.ones_like(weight)
    message = LEFT.replace(".*", r"\(blocks.0.attn.W_Q, ...\).*")
    with left(model, transplant.weights(donor, ["qkv"]), message):
        WRITERS[writer](weight)
        now = weight.detach().clone()
    assert torch.equal(weight, now)
    assert not torch.equal(now, before["blocks.0.attn.W_Q"])
    assert holds(model, {**before, "blocks.0.attn.W_Q": now})
