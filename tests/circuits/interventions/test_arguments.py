"""Tokens, batches and functions: what can be meant is taken in every form, all else is refused in one line."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

from circuits import (
    CircuitsError,
    Head,
    ablate,
    cache,
    draws,
    edit,
    grid,
    intervene,
    lens,
    patch,
    patterns,
    probe,
    run,
    sweep,
)

pytestmark = pytest.mark.usefixtures("untyped")

# Each takes a model, tokens that are right and tokens that may be wrong.
READERS = {
    "run": lambda model, tokens, x: run(model, x),
    "cache": lambda model, tokens, x: cache(model, x, "z"),
    "lens": lambda model, tokens, x: lens(model, x),
    "sweep": lambda model, tokens, x: sweep(model, x, {"0.1": ablate.zero("0.1")}),
    "mean": lambda model, tokens, x: run(model, tokens, ablate.mean("0.1", reference=x)),
    "resample": lambda model, tokens, x: run(model, tokens, ablate.resample("0.1", source=x)),
    "patch": lambda model, tokens, x: run(model, tokens, patch.activations("z", source=x)),
    "path": lambda model, tokens, x: run(model, tokens, patch.path("0.1", "1.0", source=x)),
    "attribution, base": lambda model, tokens, x: patch.attribution(model, x, tokens),
    "attribution, source": lambda model, tokens, x: patch.attribution(model, tokens, x),
}


def _with(tokens, number):
    changed = tokens.clone()
    changed[3, 2] = number
    return changed


WRONG_TOKENS = {
    "an id too many": (lambda t: _with(t, 11), r" are 0 to 11; the model has ids 0-10$"),
    "an id below 0": (lambda t: _with(t, -1), r" are -1 to 10; the model has ids 0-10$"),
    "a huge id": (lambda t: _with(t, 2**62), r" are 0 to \d{19}; the model has ids 0-10$"),
    "fractions": (lambda t: t.double(), r"\[batch pos\] are whole numbers, got float64"),
    "NaN": (lambda t: t * torch.nan, "are whole numbers, got float32"),
    "gradients": (lambda t: t.double().requires_grad_(), "are whole numbers, got float64"),
    "truth values": (lambda t: t > 4, "are whole numbers, got bool"),
    "complex": (lambda t: t.to(torch.complex64), "are whole numbers, got complex64"),
    "too long": (
        lambda t: torch.cat([t, t], 1),
        r" are \[8, 12\] \[batch pos\]; the model has room for 6 pos",
    ),
    "one example": (lambda t: t[0], r"\[batch pos\], got \[6\]$"),
    "one number": (lambda t: t[0, 0], r"\[batch pos\], got \[\]$"),
    "no examples": (lambda t: t[:0], r"\[batch pos\], got \[0, 6\]$"),
    "no positions": (lambda t: t[:, :0].numpy(), r"\[batch pos\], got \[8, 0\]$"),
    "None": (lambda t: None, r"\[batch pos\], got NoneType$"),
    "a list of numbers": (lambda t: t[0].tolist(), "a prompt is a text or a list of token ids; prompt 0 is"),
    "an array of text": (
        lambda t: t.numpy().astype(str),
        "torch has no numbers of <U21, which the array holds$",
    ),
    "an array of objects": (lambda t: t.numpy().astype(object), "torch has no numbers of object"),
    "sparse": (lambda t: t.to_sparse(), "got a sparse tensor; give a dense one that has values$"),
    "meta": (lambda t: t.to("meta"), "got a meta tensor; give a dense one that has values$"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "got a nested tensor; give a dense one"),
}


@pytest.mark.parametrize("wrong", WRONG_TOKENS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tokens_that_the_model_cannot_take(causal, tokens, wrong):
    make, message = WRONG_TOKENS[wrong]
    for name, read in READERS.items():
        with pytest.raises(CircuitsError, match=message) as caught:
            read(causal, tokens, make(tokens))
        assert "\n" not in str(caught.value), name
    # Negative ids of a batch that is right elsewhere are the last rows of the table, not an error, to torch.
    assert bool((run(causal, tokens) == causal(tokens)).all())


class ClassFit(torch.Tensor):
    pass


TOKENS = {
    "int32": lambda t: t.int(),
    "int16": lambda t: t.short(),
    "bytes": lambda t: t.to(torch.uint8),
    "a view": lambda t: torch.stack([t, t], -1)[..., 0],
    "a subclass": lambda t: t.as_subclass(ClassFit),
    "made without gradients": lambda t: _inferred(t),
    "an array": lambda t: t.numpy().copy(),
    "a list of tensors": lambda t: list(t),
    "a list of lists": lambda t: t.tolist(),
    "a transpose": lambda t: t.T.contiguous().T,
    "an array of int32": lambda t: t.numpy().astype(np.int32),
    "an array of uint16": lambda t: t.numpy().astype(np.uint16),
    "an array of uint64": lambda t: t.numpy().astype(np.uint64),
    "an array of the other byte order": lambda t: t.numpy().astype(t.numpy().dtype.newbyteorder()),
    "an array backwards": lambda t: t.numpy()[:, ::-1].copy()[:, ::-1],
    "a protected array": lambda t: _protected(t.numpy().copy()),
}


def _inferred(tokens):
    with torch.inference_mode():
        return tokens.clone()


def _protected(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("form", TOKENS)
def test_every_form_of_whole_numbers_is_the_same_tokens(causal, tokens, other_tokens, form):
    given, source = TOKENS[form](tokens), TOKENS[form](other_tokens)
    expected = causal(tokens)
    assert bool((run(causal, given) == expected).all())
    for one, other in (
        (ablate.mean("0.1", reference=source), ablate.mean("0.1", reference=other_tokens)),
        (ablate.resample("0.1", source=source), ablate.resample("0.1", source=other_tokens)),
        (patch.activations("z", source=source), patch.activations("z", source=other_tokens)),
    ):
        edited = run(causal, given, one)
        assert bool((edited == run(causal, tokens, other)).all())
        assert not bool((edited == expected).all())
    found = patch.attribution(causal, given, source, draws=9, flips=9)
    assert found.frame.effect.equals(
        patch.attribution(causal, tokens, other_tokens, draws=9, flips=9).frame.effect
    )


def test_shorter_than_the_models_context(causal, tokens):
    for length in (1, 4, 6):
        assert bool((run(causal, tokens[:, :length]) == causal(tokens[:, :length])).all())


def test_ids_at_both_ends_of_the_table(causal):
    ends = torch.tensor([[0, 10, 0, 10, 0, 10]])
    assert bool((run(causal, ends) == causal(ends)).all())


def test_vectors_on_a_bridge(make_model, tokens, by_hand, assert_same):
    """A bridge takes what its embedding would give, whatever the numbers are."""
    model = make_model(family="TransformerBridge")
    vectors = -100 * cache(model, tokens, "embed")["embed"]
    assert bool((run(model, vectors) == model(vectors)).all())
    expected = by_hand(model, tokens, lambda site, layer, x: -100 * x if site == "embed" else x)
    assert_same(run(model, vectors), expected, model(tokens))
    one = patch.activations("z", source=vectors)
    assert bool(
        (
            run(model, tokens, one)
            == run(model, tokens, patch.activations("z", source=cache(model, vectors, "z")))
        ).all()
    )


def test_inside_inference_mode(causal, tokens, other_tokens):
    one, clean = patch.activations("z", source=other_tokens), causal(tokens)
    stored = cache(causal, other_tokens, "z")
    expected = run(causal, tokens, one)
    effects = patch.attribution(causal, tokens, other_tokens, draws=9, flips=9).frame.effect
    with torch.inference_mode():
        inside = patch.activations("z", source=cache(causal, other_tokens, "z"))
        assert bool((run(causal, tokens, one) == expected).all())
        assert bool((run(causal, tokens.clone(), patch.activations("z", source=stored)) == expected).all())
        found = patch.attribution(causal, tokens.clone(), other_tokens, draws=9, flips=9)
    assert found.frame.effect.equals(effects)
    # What was made there can be used where gradients are wanted.
    with intervene(causal, inside):
        edited = causal(tokens)
    assert bool((edited == expected).all())
    assert not bool((edited == clean).all())
    (gradient,) = torch.autograd.grad(edited.sum(), [next(causal.parameters())], allow_unused=True)
    assert gradient is not None


def accepts(output, batch):
    return output[:, -1, 3]


WRONG_BATCHES = {
    "a number": (5, "got int$"),
    "text": ("abcdefgh", "got str$"),
    "a dict": (
        dict.fromkeys(range(8)),
        r"got dict; of several tensors make torch\.utils\.data\.TensorDataset",
    ),
    "a set": (set(range(8)), "got set$"),
    "a generator": ((number for number in range(8)), "got generator$"),
    "one value": (torch.tensor(3), "got Tensor$"),
    "sparse": (torch.ones(8, 2).to_sparse(), "batch: got a sparse tensor"),
    "shorter": (list(range(7)), "8 examples, batch has 7$"),
}


@pytest.mark.parametrize("wrong", WRONG_BATCHES)
def test_batches_without_rows(causal, tokens, other_tokens, wrong):
    batch, message = WRONG_BATCHES[wrong]
    with pytest.raises(CircuitsError, match=message):
        patch.attribution(causal, tokens, other_tokens, accepts, batch=batch)


@pytest.mark.parametrize("batch", [list(range(8)), np.arange(8), ("a",) * 8, torch.arange(8)], ids=type)
def test_batches_of_rows(causal, tokens, other_tokens, batch):
    found = patch.attribution(causal, tokens, other_tokens, accepts, batch=batch, draws=9, flips=9)
    assert (found.frame.n == 8).all()


@pytest.mark.parametrize("batch", [5, torch.tensor(3)], ids=["int", "a value"])
def test_a_batch_of_a_sweep_has_rows(causal, tokens, batch):
    with pytest.raises((CircuitsError, TypeError)):
        sweep(causal, tokens, {"0.1": ablate.zero("0.1")}, metric=accepts, batch=batch)


def two(first, second):
    return ablate.zero("0.1")


NOT_MAKERS = [
    (lambda: draws(5, 3), "draws: make must be a function that returns an intervention, got 5"),
    (
        lambda: draws(two, 3),
        "draws: two cannot be called as it is here: missing a required argument: 'second'",
    ),
    (lambda: grid("uniform", {"heads": ["0.1"]}), "grid: make must be a function that .* got 'uniform'"),
    (
        lambda: grid(ablate.uniform, {"head": ["0.1"]}),
        "grid: uniform cannot be called as .* argument: 'heads'",
    ),
    (
        lambda: grid(ablate.mean, {"what": ["0.1"]}),
        "^grid: mean needs reference: pass reference=tokens to grid$",
    ),
    (
        lambda: ablate.each(ablate.mean, ["0.1"]),
        "^ablate.each: mean needs reference: pass reference=tokens to ablate.each$",
    ),
    (lambda: ablate.each(ablate.resample, ["0.1"]), "needs source: pass source=tokens to ablate.each$"),
    (lambda: grid(patch.path, {"sender": ["0.1"]}), "receiver and source: pass receiver=..., source=... to"),
    (lambda: grid(two, {"first": [1]}, first=2, second=1), "grid: an axis is given as an argument, too"),
    (lambda: ablate.each(None, ["0.1"]), "ablate.each: make must be a function that .* got None"),
    (lambda: ablate.each(two, ["0.1"]), "ablate.each: two needs second: pass second=... to ablate.each"),
    (lambda: ablate.each(two, ["0.1"], third=1), "ablate.each: two cannot be called as it is here: "),
    (
        lambda: edit("z", lambda z, hook: z),
        "edit: fn is given the activation alone: <lambda> cannot be called",
    ),
    (lambda: edit("z", lambda: 1), "edit: fn is given the activation alone: <lambda> cannot be called"),
]


@pytest.mark.parametrize(("make", "message"), NOT_MAKERS, ids=range(len(NOT_MAKERS)))
def test_functions_that_take_something_else(make, message):
    with pytest.raises(CircuitsError, match=message):
        make()


def test_functions_that_do_not_tell_what_they_take(causal, tokens):
    """Those written in C have no signature."""
    assert bool((run(causal, tokens, edit("mlp_pre", torch.relu)) == causal(tokens)).all())


def test_errors_of_a_function_are_its_own():
    def broken(seed):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        draws(broken, 2)


@pytest.mark.parametrize("count", [True, 0, 1.5, "9", None])
def test_counts_of_an_attribution(causal, tokens, other_tokens, count):
    for name in ("draws", "flips"):
        with pytest.raises(CircuitsError, match="draws and flips are positive numbers up to"):
            patch.attribution(causal, tokens, other_tokens, **{name: count})


@pytest.mark.parametrize("choice", [None, 1, np.array(["batch"]), ["batch"], torch.tensor(1)], ids=type)
def test_choices_are_words(tokens, choice):
    with pytest.raises(CircuitsError, match="choose from 'zero', 'mean', 'resample'"):
        ablate.neurons(0, 1, how=choice)


@pytest.mark.parametrize("settings", [{}, {"positional_embedding_type": "rotary"}])
def test_inputs_of_other_shapes_are_refused(make_model, family, tokens, settings):
    model = make_model(0, family, **settings)
    wrong = {
        "whole numbers, got int64 [8, 6, 1]": tokens[:, :, None],
        "the model has room for 6 positions": torch.cat([tokens, tokens], 1),
    }
    vectors = torch.ones(8, 6, 15, dtype=torch.float64)
    if family == "HookedTransformer":
        wrong["whole numbers, got float64 [8, 6, 15]"] = vectors
    else:
        wrong["are vectors [8, 6, 15]; the model's have 16 entries"] = vectors
    for message, given in wrong.items():
        with pytest.raises(CircuitsError, match=re.escape(message)):
            run(model, given)


@pytest.mark.parametrize(
    "given",
    [
        np.array([0, 1, 1, 0, 0, 1]),
        np.array([0, 1, 1, 0, 0, 1], dtype=np.uint8),
        torch.tensor([1, 0], dtype=torch.uint8),
        torch.zeros(6, dtype=torch.int32),
        torch.ones(6),
        [0, 1, 1, 0, 0, 1],
        (1, 1),
        pd.Series([0, 1, 1, 0, 0, 1]),
        [torch.tensor(True), torch.tensor(False)],
        [True, False],
    ],
)
def test_a_mask_of_numbers_is_not_taken_for_the_numbers_0_and_1(causal, tokens, given):
    """Wherever positions, keys, neurons or examples can be given as numbers or as a mask."""
    target = torch.arange(8.0).expand(6, 8).T.clone()
    for call in (
        lambda: ablate.uniform("0.0", positions=given),
        lambda: ablate.zero("0.0", positions=given),
        lambda: ablate.uniform("0.0", keys=given),
        lambda: patch.path("0.0", "1.0", tokens, positions=given),
        lambda: sweep(causal, tokens, {"a": ablate.zero("0.0")}, positions=given),
        lambda: patterns.attention(causal, tokens, positions=given),
        lambda: probe.linear(causal, tokens, target, positions=given),
        lambda: probe.linear(causal, tokens, target, test=given),
        lambda: ablate.neurons(0, given),
        lambda: edit("mlp_post.0", torch.zeros_like, neurons=given),
    ):
        with pytest.raises(
            CircuitsError, match=r"can be read as a mask|or a\s+boolean mask|whole numbers from 0"
        ) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [np.array([[0, 1], [1, 0]]), torch.ones(8, 6, dtype=torch.uint8)])
def test_a_mask_of_numbers_for_each_example(given):
    for call in (lambda: ablate.zero("0.0", positions=given), lambda: ablate.uniform("0.0", keys=given)):
        with pytest.raises(
            CircuitsError, match="one list for all examples, a mask of each example's is boolean"
        ):
            call()


def test_of_two_positions_an_array_could_be_a_mask(causal, tokens):
    """A list of int is positions, whatever the length; an array may be, where the run is longer."""
    short, both = tokens[:, :2], ablate.zero("0.0", positions=[0, 1])
    assert ablate.zero("0.0", positions=np.array([0, 1])) == both
    assert bool((run(causal, short, both) == run(causal, short, ablate.zero("0.0"))).all())
    for given in (np.array([0, 1]), torch.tensor([1, 0])):
        run(causal, tokens, ablate.zero("0.0", positions=given), ablate.uniform("0.1", keys=given))
        for one in (ablate.zero("0.0", positions=given), ablate.uniform("0.1", keys=given)):
            with pytest.raises(CircuitsError, match="2 numbers that are all 0 or 1 can be read as a mask"):
                run(causal, short, one)
        with pytest.raises(CircuitsError, match="can be read as a mask"):
            patterns.attention(causal, short, positions=given)
    run(
        causal, tokens, ablate.zero("0.0", positions=np.array([1])), ablate.zero("0.0", positions=np.uint8(1))
    )


# Each takes heads, and tokens where it needs some.
TAKING_HEADS = {
    "uniform": lambda heads, x: ablate.uniform(heads),
    "mean_pattern": lambda heads, x: ablate.mean_pattern(heads, reference=x),
    "zero": lambda heads, x: ablate.zero(heads),
    "mean": lambda heads, x: ablate.mean(heads, reference=x),
    "resample": lambda heads, x: ablate.resample(heads, source=x),
    "all_but": lambda heads, x: ablate.all_but(heads, reference=x),
    "edit": lambda heads, x: edit("q", torch.zeros_like, heads=heads),
    "patch": lambda heads, x: patch.activations("z", x, heads=heads),
    "sender": lambda heads, x: patch.path(heads, "output", x),
    "receiver": lambda heads, x: patch.path("embed", heads, x),
    "receiver at q": lambda heads, x: patch.path("embed", ("q", heads), x),
    "receivers": lambda heads, x: patch.path("embed", (heads, "output"), x),
}


@pytest.mark.parametrize("taken", TAKING_HEADS)
def test_heads_in_a_list_are_heads_in_a_tuple(tokens, taken):
    """Whatever heads they are written as, one or two. A list of two numbers is no head: it could be two of a layer."""
    make = TAKING_HEADS[taken]
    for one, other in [("1.0", "0.1"), (Head(1, 0), Head(0, 1)), ((1, 0), (0, 1)), ([1, 0], "L0H1")]:
        for given in ([one], [one, other]):
            expected = make("1.0" if len(given) == 1 else "1.0, 0.1", tokens)
            assert make(given, tokens) == make(tuple(given), tokens) == expected
    assert make((1, 0), tokens) == make("1.0", tokens)
    with pytest.raises(CircuitsError, match="cannot read 1 as a head"):
        make([1, 0], tokens)
