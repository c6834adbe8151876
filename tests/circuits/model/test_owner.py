"""One thread has a model while a block is open on it, and others are refused in one line; what a block leaves."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from circuits import CircuitsError, ablate, intervene, lens, run, sweep, transplant
from circuits.model.edit_state import EditState, _states
from circuits.model.hooks import RevocableFunction

REFUSED = (
    "^the model is in use by thread .*, and thread .* runs it; leave the block there first, or take a copy$"
)


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(60)


CALLS = {
    "run": lambda model, tokens: run(model, tokens),
    "direct": lambda model, tokens: model(tokens),
    "block": lambda model, tokens: intervene(model, ablate.zero("1.2")).__enter__(),
    "sweep": lambda model, tokens: sweep(model, tokens, {"a": ablate.zero("0.1")}, draws=2, flips=2),
    "lens": lambda model, tokens: lens(model, tokens),
    "transplant": lambda model, tokens: transplant.weights(model, ["qkv"]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_in_another_thread_while_a_block_is_open(make_model, family, tokens, call):
    model = make_model(0, family)
    edited = run(model, tokens, ablate.uniform("0.1"))
    with intervene(model, ablate.uniform("0.1")):
        with pytest.raises(CircuitsError, match=REFUSED):
            in_thread(lambda: call(model, tokens))
        assert torch.equal(model(tokens), edited)
    in_thread(lambda: run(model, tokens))


def test_a_block_left_open_by_a_thread_that_has_ended(make_model, tokens):
    model, block = make_model(0), None

    def enter():
        nonlocal block
        block = intervene(model, ablate.zero("0.1"))
        block.__enter__()
        model(tokens)

    in_thread(enter)
    with pytest.raises(CircuitsError, match=REFUSED):
        run(model, tokens)
    block.__exit__(None, None, None)
    assert run(model, tokens).shape


def test_a_generator_that_is_thrown_away_gives_the_model_back(make_model, tokens):
    model = make_model(0)

    def inside():
        with intervene(model, ablate.zero("0.1")):
            yield model(tokens)

    generator = inside()
    next(generator)
    del generator
    gc.collect()
    in_thread(lambda: run(model, tokens))
    assert model not in _states


@pytest.mark.parametrize("exit_of", [(RevocableFunction, "remove"), (EditState, "replaced_values")])
def test_what_an_exit_that_fails_leaves_on_the_model_is_taken_off_with_the_last_block(
    make_model, tokens, monkeypatch, exit_of
):
    """As Ctrl-C may come anywhere."""
    model, other = make_model(0), make_model(1)
    before, expected = {name: x.clone() for name, x in model.state_dict().items()}, model(tokens)

    def fails(*given):
        raise KeyboardInterrupt

    block = ExitStack()
    block.enter_context(intervene(model, transplant.weights(other, "attn"), ablate.zero("mlp_out.1")))
    assert not torch.equal(model(tokens), expected)
    with monkeypatch.context() as patches:
        patches.setattr(*exit_of, fails)
        with pytest.raises(KeyboardInterrupt):
            block.close()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(model(tokens), expected)
    assert torch.equal(run(model, tokens), expected)
