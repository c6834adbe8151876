"""Ctrl-C waits while a block is entered or left."""

import signal
import threading
from contextlib import ExitStack

import pytest
import torch

from circuits import ablate, intervene, run, transplant
from circuits.model.contexts import interruptible, model_block
from circuits.model.edit_state import State
from circuits.model.hooks import Revocable


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def log():
    return []


@model_block
def block(log, entering=lambda: None, leaving=lambda: None):
    entering()
    log.append("on")
    try:
        yield
    finally:
        leaving()
        log.append("off")


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_an_interrupt_at_an_edge_comes_when_all_is_put_off(log, when):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), block(log), block(log, **{when: press}):
        log.append("body")
    assert log == ["on", "on", *(["body"] if when == "leaving" else []), "off", "off"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("call", [press, lambda: interruptible(press)])
def test_an_interrupt_in_the_body_or_in_a_run_comes_at_once(log, call):
    with pytest.raises(KeyboardInterrupt), block(log):
        log.append(call())
    with pytest.raises(KeyboardInterrupt), block(log, lambda: log.append(interruptible(press))):
        pass
    assert log == ["on", "off"]


def test_a_handler_that_raises_nothing_is_called_once_and_the_block_goes_on(log):
    before = signal.signal(signal.SIGINT, lambda *_: log.append("handled"))
    try:
        with block(log, press):
            log.append("body")
    finally:
        signal.signal(signal.SIGINT, before)
    assert log == ["on", "handled", "body", "off"]


def test_other_threads_and_ended_blocks_leave_the_handler_alone(make_model, tokens):
    model, before = make_model(0), signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: run(model, tokens, ablate.zero("0.1")))
    thread.start()
    thread.join()
    with intervene(model, ablate.zero("0.1")):
        model(tokens)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("exit_of", [(Revocable, "remove"), (State, "end")])
def test_what_an_exit_that_fails_leaves_on_the_model_is_taken_off_with_the_last_block(
    make_model, tokens, monkeypatch, exit_of
):
    """As an exception that another thread throws in may come anywhere, also where Ctrl-C waits."""
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
