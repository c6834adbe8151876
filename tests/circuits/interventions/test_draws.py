"""Several draws of one intervention: a row each, and one that pools them."""

import numpy as np
import torch

from circuits import ablate, draws, edit, permute, run, sweep
from circuits.statistics import summary_columns


def metric(output):
    """A plain value, a ratio whose counts the edit moves, and a flag."""
    large = output.abs() > 1
    return {
        "value": output[:, -1, 0],
        "ratio": ((output.abs() * large).flatten(1).sum(1), large.flatten(1).sum(1)),
        "flag": output[:, -1].argmax(-1) == 3,
    }


def test_draws_are_unrelated_reproducible_and_a_prefix_of_more():
    few, more, other = (permute.draws(count, seed).interventions for count, seed in ((4, 0), (9, 0), (9, 1)))
    assert more[:4] == few
    assert len({one.replacement.seed for one in more + other}) == 18
    seen = []
    draws(lambda seed: seen.append(seed) or permute.positions(seed), 3, seed=5)
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seen)
    state = np.random.get_state()[1].tolist(), torch.get_rng_state()
    permute.draws(3)
    assert np.random.get_state()[1].tolist() == state[0]
    assert bool((torch.get_rng_state() == state[1]).all())


def test_a_row_for_each_draw_and_one_that_pools_them(causal, tokens, other_tokens):
    drawn = draws(lambda seed: ablate.resample("all", source=other_tokens, seed=seed), 4)
    result = sweep(causal, tokens, {"first": ablate.zero("0.1"), "many": drawn}, metric=metric, batch_size=3)
    assert result.frame["variant"].tolist() == ["first"] * 3 + ["many"] * 15
    assert result.frame["draw"].fillna(-1).tolist() == [-1] * 6 + sorted([0, 1, 2, 3] * 3)
    clean = metric(run(causal, tokens))
    singles = [metric(run(causal, tokens, one)) for one in drawn.interventions]
    for name in ("value", "ratio", "flag"):
        pairs = [
            found[name] if isinstance(found[name], tuple) else (found[name], torch.ones(8))
            for found in (clean, *singles)
        ]
        sums, counts = (np.stack([pair[at].double().numpy() for pair in pairs]) for at in (0, 1))
        # One more series, by hand: in each example the mean draw.
        sums, counts = (np.concatenate([x, x[1:].mean(0, keepdims=True)]) for x in (sums, counts))
        expected = summary_columns(sums, counts, seed=0, draws=1000, flips=9999, level=0.95)
        rows = result.frame[(result.frame["metric"] == name) & (result.frame["variant"] == "many")]
        assert rows["draw"].isna().tolist() == [True] + [False] * 4
        for column, values in (
            ("value", expected["value"]),
            ("effect", expected["effect"]),
            ("value_ci_low", expected["value_ci_low"]),
        ):
            np.testing.assert_allclose(rows[column], [values[5], *values[1:5]], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(
            rows["effect_ci_high"].iloc[0], expected["effect_ci_high"][5], rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(rows["p_value"].iloc[0], expected["p_value"][5])
    # The draws are not questions of their own: only the pooled row is tested and counted by Holm.
    assert result.frame.loc[result.frame["draw"].isna(), "p_value"].notna().all()
    assert result.frame.loc[result.frame["draw"].notna(), ["p_value", "p_adjusted"]].isna().all(axis=None)
    p_values = sorted(result.frame["p_value"].dropna())
    np.testing.assert_allclose(result.frame["p_adjusted"].min(), min(1, 6 * p_values[0]))
    assert len(result.interventions["many"]) == 4


def test_draws_without_effect_are_no_effect_together(causal, tokens):
    """Three times a number, divided by three, need not be the number."""
    nothing = draws(lambda seed: edit("z", lambda z: z), 3)
    frame = sweep(causal, tokens, {"none": nothing}, metric=metric).frame
    assert frame["null_effect"].all()
    assert (frame["effect"] == 0).all()
    assert (frame["p_value"].dropna() == 1).all()
