"""One thread at a time has a model: others wait, or hear in one line why that is in vain."""

import copy
import gc
import os
import threading
import time

import pytest
import torch

from circuits import CircuitsError, ablate, edit, intervene, patch, run, sweep, transplant
from circuits.model import locks as locks
from circuits.model.record import evaluating
from circuits.model.state import substituted


def in_thread(function):
    """What it returns or raises, and its thread."""
    found = []

    def work():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return found, thread


def ended(found, thread):
    thread.join(60)
    assert found, "the thread hangs"
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def waits(thread):
    """Whether it has been waiting for a model for a while."""
    for _ in range(200):
        if any(one.user.thread is thread for one in locks._waiting):
            return True
        if not thread.is_alive():
            return False
        time.sleep(0.01)
    return False


def test_a_second_thread_waits_for_the_end_of_a_block(make_model, family, tokens):
    model = make_model(0, family)
    alone = run(model, tokens, ablate.zero("1.2"))
    with intervene(model, ablate.uniform("0.1")):
        model(tokens)
        found, thread = in_thread(lambda: run(model, tokens, ablate.zero("1.2")))
        assert waits(thread)
        assert not found
    assert torch.equal(ended(found, thread), alone)


@pytest.mark.parametrize("what", ["sweep", "transplant"])
def test_what_waits(make_model, tokens, what):
    """Every verb does: the campaign has the others."""
    model, donor = make_model(0), make_model(1)

    def called():
        if what == "sweep":
            return sweep(model, tokens, {"a": ablate.zero("0.1")}, draws=2, flips=2).frame
        return transplant.weights(model, ["qkv"])

    alone = called()
    with intervene(model, transplant.weights(donor, ["qkv"])):
        found, thread = in_thread(called)
        assert waits(thread)
    again = ended(found, thread)
    assert again.equals(alone) if what == "sweep" else again == alone


@pytest.mark.parametrize("what", ["intervene", "checkpoints", "sweep", "sweep, naive", "bounded", "edges"])
def test_parameters_are_not_looked_up_while_another_thread_has_others_in_place(make_model, tokens, what):
    """As a sweep over checkpoints has, for a function transform."""
    model, donor = make_model(0), make_model(1)

    def called():
        if what == "intervene":
            with intervene(model, transplant.weights(donor, ["qkv"])):
                return model(tokens)
        if what == "edges":
            return patch.edges(model, tokens, tokens.flip(1), steps=1, exact=1, draws=2, flips=2).frame
        options = {
            "checkpoints": {"checkpoints": {"a": donor.state_dict()}},
            "sweep, naive": {"engine": "naive"},
            "bounded": {"memory": 10**9},
        }
        variants = {"a": ablate.zero("0.1")}
        return sweep(model, tokens, variants, draws=2, flips=2, **options.get(what, {})).frame

    alone = called()
    others = {name: parameter.detach()[None] for name, parameter in model.named_parameters()}
    threads = []

    def traced(values):
        with evaluating(model), substituted(model, values):
            found, thread = in_thread(called)
            assert waits(thread), found
            threads.append((found, thread))
        return next(iter(values.values()))

    torch.func.vmap(traced)(others)
    again = ended(*threads[0])
    assert torch.equal(again, alone) if what == "intervene" else again.equals(alone)


def test_models_that_share_nothing_do_not_wait(make_model, family, tokens):
    """Both threads are inside a run at one time."""
    both = threading.Barrier(2, timeout=60)
    one, two = make_model(0, family), make_model(1, family)

    def meet(z):
        both.wait()
        return z

    found, thread = in_thread(lambda: run(one, tokens, edit("z.0", meet)))
    run(two, tokens, edit("z.0", meet))
    ended(found, thread)


@pytest.mark.parametrize("shared", ["blocks", "a parameter", "the memory of one"])
def test_models_that_share_a_part_wait(make_model, hooked_only, tokens, shared):
    one, two = make_model(0), make_model(1)
    if shared == "blocks":
        two.blocks = one.blocks
    elif shared == "a parameter":
        two.embed.W_E = one.embed.W_E
    else:
        two.embed.W_E = torch.nn.Parameter(one.embed.W_E.data)
    with intervene(one, ablate.zero("0.1")):
        one(tokens)
        found, thread = in_thread(lambda: run(two, tokens))
        assert waits(thread)
    assert torch.equal(ended(found, thread), run(two, tokens))


def test_a_thread_may_take_it_again(make_model, family, tokens):
    """As a hook does that runs the model."""
    model, found = make_model(0, family), []

    def calls(z):
        # It is in force in the run that it starts, too.
        if not found:
            found.append(None)
            found.append(run(model, tokens, ablate.zero("1.0")))
        return z

    with intervene(model):
        run(model, tokens, edit("z.0", calls))
    assert torch.equal(found[1], run(model, tokens, ablate.zero("1.0")))


def test_a_run_by_other_means_in_another_thread(make_model, family, tokens):
    """It would be edited, and disturb the block's own."""
    model = make_model(0, family)
    edited = run(model, tokens, ablate.uniform("0.1"))
    with intervene(model, ablate.uniform("0.1")):
        found, thread = in_thread(lambda: model(tokens))
        with pytest.raises(
            CircuitsError, match=r"the model is in use by thread .*, and thread .* runs it; threads"
        ):
            ended(found, thread)
        assert torch.equal(model(tokens), edited)
    found, thread = in_thread(lambda: model(tokens))
    assert torch.equal(ended(found, thread), model(tokens))


def test_two_that_wait_for_each_other(make_model, tokens):
    """One of them is told; the other goes on."""
    one, two = make_model(0), make_model(1)
    both = threading.Barrier(2, timeout=60)

    def crossed(first, second):
        with intervene(first):
            first(tokens)
            both.wait()
            return run(second, tokens)

    other, thread = in_thread(lambda: crossed(two, one))
    mine = in_thread(lambda: crossed(one, two))
    for started in (thread, mine[1]):
        started.join(60)
    (refused,) = [result for (result,) in (other, mine[0]) if isinstance(result, Exception)]
    assert isinstance(refused, CircuitsError)
    assert "take several models in the same order in all threads" in str(refused)
    assert run(one, tokens).shape == run(two, tokens).shape


def test_a_block_left_open_by_a_thread_that_has_ended(make_model, tokens):
    model, kept = make_model(0), []

    def enter():
        kept.append(intervene(model, ablate.zero("0.1")))
        kept[0].__enter__()
        model(tokens)

    ended(*in_thread(lambda: enter() or True))
    with pytest.raises(CircuitsError, match="which has ended inside a block of intervene"):
        run(model, tokens)
    # Ended here, it gives the model back.
    kept[0].__exit__(None, None, None)
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
    ended(*in_thread(lambda: run(model, tokens)))
    assert not locks._held


def test_a_thread_that_holds_a_model_and_waits_for_its_workers(make_model, tokens, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.5)
    model = make_model(0)
    with intervene(model, ablate.zero("0.1")):
        model(tokens)
        found, thread = in_thread(lambda: run(model, tokens))
        with pytest.raises(CircuitsError, match="which has run nothing for 0 s; leave the block"):
            ended(found, thread)


def test_the_first_to_wait_is_the_first_to_have_it(make_model, tokens):
    model, order, threads = make_model(0), [], []
    with intervene(model):
        for name in range(4):
            found, thread = in_thread(lambda name=name: (run(model, tokens), order.append(name)))
            threads.append((found, thread))
            assert waits(thread)
    for found, thread in threads:
        ended(found, thread)
    assert order == sorted(order) == [0, 1, 2, 3]


def test_copies_of_a_model_in_use(make_model, family, tokens):
    """There is no lock on the model that a copy would take along."""
    model = make_model(0, family)
    with intervene(model, ablate.zero("0.1")):
        model(tokens)
        made = copy.deepcopy(model)
    ended(*in_thread(lambda: run(made, tokens)))
    assert torch.equal(run(made, tokens), run(model, tokens))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_of_a_process_in_which_a_thread_has_the_model(make_model, tokens):
    """Nobody will ever give it back there; the model is half edited, and no other is."""
    model, free = make_model(0), make_model(1)
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with intervene(model, ablate.zero("0.1")):
            model(tokens)
            inside.set()
            leave.wait(60)

    found, thread = in_thread(lambda: hold() or True)
    assert inside.wait(60)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for one in (model, free):
            try:
                run(one, tokens)
                answers.append("ran")
            except CircuitsError as error:
                answers.append(str(error))
        os.write(write, "|".join(answers).encode())
        os._exit(0)
    leave.set()
    os.waitpid(child, 0)
    refused, ran = os.read(read, 4096).decode().split("|")
    assert "which has ended inside a block of intervene" in refused
    assert ran == "ran"
    ended(found, thread)
