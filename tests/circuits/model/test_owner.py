"""One thread and task of asyncio has a model while a block is open on it; others are refused in one line."""

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from circuits import CircuitsError, ablate, intervene, lens, run, sweep, transplant
from circuits.model import contexts

REFUSED = r"^the model is in use by .*, and .* runs it; leave the block there first, or take a copy$"


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
def test_a_call_in_another_thread_or_task_while_a_block_is_open(make_model, family, tokens, call):
    model = make_model(0, family)
    edited = run(model, tokens, ablate.uniform("0.1"))

    async def another():
        call(model, tokens)

    async def block():
        with intervene(model, ablate.uniform("0.1")):
            with pytest.raises(CircuitsError, match=REFUSED):
                await asyncio.create_task(another())
            with pytest.raises(CircuitsError, match=REFUSED):
                await asyncio.to_thread(call, model, tokens)
            assert torch.equal(model(tokens), edited)

    asyncio.run(block())
    in_thread(lambda: run(model, tokens))


def test_tasks_have_a_block_around_their_loop_and_one_of_an_ended_task(make_model, tokens):
    """A notebook runs every cell that awaits as a task of its own."""
    model, block = make_model(0), None
    expected = run(model, tokens, ablate.zero("0.1"), ablate.zero("1.2"))

    async def inside():
        return run(model, tokens, ablate.zero("1.2"))

    async def enter():
        nonlocal block
        block = intervene(model, ablate.zero("0.1"))
        block.__enter__()

    async def cells():
        await asyncio.create_task(enter())
        found = await asyncio.create_task(inside())
        block.__exit__(None, None, None)
        return found

    with intervene(model, ablate.zero("0.1")):
        model(tokens)
        assert torch.equal(asyncio.run(inside()), expected)
    assert torch.equal(asyncio.run(cells()), expected)


@pytest.mark.parametrize("shared", ["blocks", "a parameter", "the memory of one"])
def test_models_that_share_a_part_are_one(make_model, hooked_only, tokens, shared):
    one, two = make_model(0), make_model(1)
    if shared == "blocks":
        two.blocks = one.blocks
    elif shared == "a parameter":
        two.embed.W_E = one.embed.W_E
    else:
        two.embed.W_E = torch.nn.Parameter(one.embed.W_E.data)
    with intervene(one, ablate.zero("0.1")):
        one(tokens)
        with pytest.raises(CircuitsError, match=REFUSED):
            in_thread(lambda: run(two, tokens))
    assert torch.equal(in_thread(lambda: run(two, tokens)), run(two, tokens))


def test_a_block_left_open_by_a_thread_that_has_ended(make_model, tokens):
    model, block = make_model(0), None

    def enter():
        nonlocal block
        block = intervene(model, ablate.zero("0.1"))
        block.__enter__()
        model(tokens)

    in_thread(enter)
    with pytest.raises(CircuitsError, match=r"in use by thread .* \(ended\), and"):
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
    assert not contexts._holds
