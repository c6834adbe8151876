import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, heads, logit_difference, patch, run, sweep


@pytest.fixture(autouse=True)
def engine(each_engine):
    """All of this holds for both engines."""
    return each_engine


def test_the_metric_is_called_once_per_variant_and_chunk_on_one_variant(causal, tokens):
    calls = []

    def metric(output, part):
        calls.append((len(output), len(part)))
        return output[:, -1, 0]

    sweep(causal, tokens, ablate.each(ablate.zero, ["0.1", "0.2"]), metric, tokens, batch_size=3)
    assert calls == [(3, 3)] * 6 + [(2, 2)] * 3


@pytest.mark.parametrize("engine", ["auto", "naive"])
@pytest.mark.parametrize("batch_size", [3, 5, 16])
def test_a_source_that_is_what_was_there_has_no_effect_on_any_processor(
    hooked_only, make_model, tokens, other_tokens, batch_size, engine
):
    """On some the last digits of an example depend on how many are beside it; here, by a hook, on all."""
    model = make_model(family=hooked_only)
    prefix = other_tokens.clone()
    prefix[:, :3] = tokens[:, :3]
    grid = {
        "itself": patch.activations("z.1", tokens),
        "a path from itself": patch.path("0.1", "1.2", tokens),
        "where prompts agree": patch.activations("resid_post.0", prefix, positions=[2]),
        "where they do not": patch.activations("resid_post.0", prefix, positions=[3]),
    }
    handle = model.embed.register_forward_hook(lambda module, given, x: x * (1 + 1e-14 * len(x)))
    try:
        whole, part = model(tokens)[:3], model(tokens[:3])
        frame = sweep(
            model, tokens, grid, metric=lambda x: x[:, -1, 0], batch_size=batch_size, engine=engine
        ).frame
    finally:
        handle.remove()
    assert not (whole == part).all()
    assert frame["null_effect"].tolist() == [True, True, True, False]
    assert (frame["p_value"][:3] == 1).all()


def test_changes_that_cancel_are_an_effect_of_zero_but_not_none(causal, tokens):
    alternating = torch.tensor([1.0, -1.0] * 4)

    def metric(output):
        edited = not torch.allclose(output, run(causal, tokens))
        return alternating if edited else torch.zeros(8)

    frame = sweep(causal, tokens, {"a": ablate.zero("0.1")}, metric=metric).frame
    assert frame["effect"][0] == 0
    assert not frame["null_effect"][0]


def test_an_example_without_entries_and_a_metric_without_any(causal, tokens):
    def metric(output):
        sums, counts = output[:, -1, 0].clone(), torch.ones(len(output))
        sums[0], counts[0] = 0, 0
        return {"some": (sums, counts), "none": (sums * 0, counts * 0)}

    frame = sweep(causal, tokens, {"zero": ablate.zero("0.1")}, metric=metric).frame.set_index("metric")
    np.testing.assert_allclose(
        frame["value"]["some"], run(causal, tokens, ablate.zero("0.1"))[1:, -1, 0].mean()
    )
    assert frame.loc["none", ["value", "effect", "p_value", "p_adjusted"]].isna().all()
    assert not frame["null_effect"]["none"]


def test_clean_passes_are_shared_by_variants(causal, tokens):
    """Eight means over one reference cost one clean pass in all, not eight."""
    passes = []
    causal.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0])))
    reference = tokens[:5]
    sweep(causal, tokens, ablate.each(ablate.mean, heads("all", causal), reference=reference))
    assert passes.count(5) == 1
    assert passes.count(8) == 9


def test_positions_default_to_those_that_the_metric_says_it_reads(causal, tokens):
    class Task:
        read_positions = (-1,)

        def last(self, output):
            assert bool(output[:, :-1].isnan().all())
            return output[:, -1, 0]

        def wrong(self, output):
            return output[:, 0, 0]

    variants = {"zero": ablate.zero("0.1")}
    result = sweep(causal, tokens, variants, metric=Task().last)
    assert result.settings["positions"] == [-1]
    several = {"first": logit_difference(1, 2, position=0), "last": logit_difference(1, 2)}
    assert sweep(causal, tokens, variants, several).settings["positions"] == [0, -1]
    with pytest.raises(CircuitsError, match="not finite"):
        sweep(causal, tokens, variants, metric=Task().wrong)
    for first in ([0], slice(0, 1)):
        assert sweep(causal, tokens, variants, metric=Task().wrong, positions=first).settings[
            "positions"
        ] == [0]
