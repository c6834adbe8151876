"""What averages over tokens refuses padding, which only the model's tokenizer knows of."""

from types import SimpleNamespace

import pytest
import torch

from circuits import CircuitsError, ablate, intervene, patch, patterns, probe, prompts, run, sweep
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import find_padding

PAD = 10


@pytest.fixture
def padded(make_model, tokens):
    """A model with a tokenizer, tokens without padding, and the same with it after some of them."""
    model = make_model()
    model.tokenizer = SimpleNamespace(
        pad_token_id=PAD, bos_token_id=None, eos_token_id=None, padding_side="right"
    )
    plain = tokens.clamp(max=PAD - 1)
    ragged = plain.clone()
    ragged[2:5, 4:] = PAD
    return model, plain, ragged


def test_what_is_padding(make_model, hooked_only):
    model = make_model()
    given = torch.tensor([[1, 9, 3, 9], [9, 9, 1, 2], [1, 2, 9, 9], [9, 1, 2, 9]])
    assert find_padding(HookedModel(model), given) is None
    for bos, eos, expected in (
        (None, None, [[0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]]),
        (9, None, [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]),
        (9, 9, [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]),
    ):
        model.tokenizer = SimpleNamespace(
            pad_token_id=9, bos_token_id=bos, eos_token_id=eos, padding_side="right"
        )
        assert find_padding(HookedModel(model), given).tolist() == torch.tensor(expected).bool().tolist()
        assert find_padding(HookedModel(model), given[:, :0]) is None
    model.tokenizer = SimpleNamespace(pad_token_id=None, padding_side="right")
    assert find_padding(HookedModel(model), given) is None


ZERO, FEW = {"0.1": ablate.zero("0.1")}, {"draws": 1, "flips": 1}


def last(output):
    return output[:, 3].sum(1)


# What averages over tokens: with all tokens in one length, and with padding that no mask tells of.
BY_POSITION = {
    "mean": lambda model, plain, tokens: run(model, plain, ablate.mean("0.1", tokens)),
    "mean of neurons": lambda model, plain, tokens: run(
        model, plain, ablate.neurons(0, [1], "mean", reference=tokens)
    ),
    "mean_pattern": lambda model, plain, tokens: run(model, plain, ablate.mean_pattern("0.1", tokens)),
    "resample": lambda model, plain, tokens: run(model, plain, ablate.resample("0.1", tokens)),
}
OVER_TOKENS = {
    "pooled": lambda model, plain, tokens: run(model, plain, ablate.mean("z.0", tokens, over="batch,pos")),
    "probe": lambda model, plain, tokens: probe.linear(
        model, tokens, torch.arange(8.0).expand(6, 8).T.clone(), draws=10
    ),
    "attention": lambda model, plain, tokens: patterns.attention(model, tokens),
    "scores": lambda model, plain, tokens: patterns.scores(model, tokens, {"same": patterns.identity(6)}),
    "movement": lambda model, plain, tokens: patterns.movement(model, tokens, plain, draws=10),
    "sweep": lambda model, plain, tokens, metric=None: sweep(model, tokens, ZERO, metric, **FEW),
    "attribution": lambda model, plain, tokens, metric=None: patch.attribution(
        model, tokens, plain, metric, **FEW
    ),
    "screen": lambda model, plain, tokens, metric=None: patch.screen(
        model, tokens, plain, metric, steps=1, exact=1, **FEW
    ),
    "edges": lambda model, plain, tokens, metric=None: patch.edges(
        model, tokens, plain, metric, steps=1, exact=1, **FEW
    ),
}


@pytest.mark.parametrize("name", [*BY_POSITION, *OVER_TOKENS])
def test_averages_over_padding_are_refused(padded, name):
    """At one position either all examples are padding, or none; the default metrics are means over positions."""
    model, plain, ragged = padded
    equal = plain.clone()
    equal[:, 4:] = PAD
    call = (BY_POSITION | OVER_TOKENS)[name]
    call(model, plain, plain)
    with pytest.raises(CircuitsError, match="3 of 8 examples have padding that would be taken for tokens"):
        call(model, plain, ragged)
    if name in BY_POSITION:
        call(model, plain, equal)
    if name in ("sweep", "attribution", "screen", "edges"):
        call(model, plain, ragged, last)
    model.tokenizer = None
    call(model, plain, ragged)


def test_positions_without_padding_are_averaged(padded):
    model, _, ragged = padded
    patterns.attention(model, ragged, positions=ragged != PAD)
    # No example has padding where it is read; at the last position three have.
    sweep(model, ragged, ZERO, positions=[0, 1, 2, 3], **FEW)
    for positions in ([-1], [0, 4]):
        with pytest.raises(CircuitsError, match="3 of 8 examples have padding"):
            sweep(model, ragged, ZERO, positions=positions, **FEW)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("bos", [PAD, 3])
def test_tokens_that_the_model_masks_itself_carry_that_mask(make_model, hooked_only, tokens, begins, bos):
    """With a tokenizer that pads on the left: positions, means and metrics are of the prompts, on every route."""
    model = make_model(default_prepend_bos=begins)
    model.tokenizer = SimpleNamespace(
        pad_token_id=PAD, bos_token_id=bos, eos_token_id=None, padding_side="left"
    )
    left = tokens.clamp(max=PAD - 1)
    zero = {"a": ablate.zero("0.1", positions=[0])}
    assert set(sweep(model, left, zero, draws=2, flips=2).frame["engine"]) == {"fast"}
    left[:3, :2] = PAD
    start = 1 if begins and bos == PAD else 2
    made = prompts(model, left)
    assert made.lengths.tolist() == [6 - start] * 3 + [6] * 5
    rows = [row[kept] for row, kept in zip(left, made.real, strict=True)]
    one = ablate.zero("0.1", positions=[0])
    by_route = [run(model, given, one) for given in (left, made)]
    with intervene(model, one):
        by_route += [model(left), model.run_with_hooks(left)]
    model.tokenizer = None
    for output in by_route:
        for row, (found, kept) in enumerate(zip(output, made.real, strict=True)):
            torch.testing.assert_close(found[kept], run(model, rows[row][None], one)[0])
    expected = sweep(model, made, zero, draws=2, flips=2).frame["value"]
    model.tokenizer = SimpleNamespace(
        pad_token_id=PAD, bos_token_id=bos, eos_token_id=None, padding_side="left"
    )
    found = sweep(model, left, zero, draws=2, flips=2)
    assert list(found.frame["value"]) == list(expected)
    assert set(found.frame["engine"]) == {"fast"}
