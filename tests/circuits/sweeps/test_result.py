import copy
import dataclasses
import json
import pickle

import pandas as pd
import pytest

from circuits import SweepResult, ablate, compare, draws, heads, run, sweep
from circuits.statistics import holm_adjusted
from circuits.sweeps.sweep_result import COLUMNS


@pytest.fixture(scope="module")
def result(make_model, tokens):
    model = make_model()
    return sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)), draws=50, flips=50)


def test_one_metric_is_a_family_of_tests_of_its_own(result):
    # Of the variants of the model's metrics only logit_diff is tested; here kl has p-values too.
    tested = result.frame[result.frame["metric"] != "mse"].reset_index(drop=True)
    p_values = [0.5, 0.01] + [0.5, 0.02] + [1.0, 0.04] + [1.0] * 10
    several = dataclasses.replace(result, frame=tested.assign(p_value=p_values))
    assert list(several.frame["metric"][:2]) == ["kl", "logit_diff"]
    one = several.of_metric("logit_diff")
    # Eight tests: the smallest p-value times 8, the next times 7, and times 6.
    assert list(one.frame["p_adjusted"]) == pytest.approx([8 * 0.01, 7 * 0.02, 6 * 0.04] + [1.0] * 5)
    whole = several.frame[several.frame["metric"] == "logit_diff"].reset_index(drop=True)
    pd.testing.assert_frame_equal(one.frame.drop(columns="p_adjusted"), whole.drop(columns="p_adjusted"))
    assert one.metrics == list(one.baseline["metric"]) == ["logit_diff"]
    assert (one.interventions, one.settings) == (result.interventions, result.settings)
    pd.testing.assert_frame_equal(result.of_metric("all").frame, result.frame)
    tables = (each.pivot("layer", "head", "effect", "kl") for each in (result, result.of_metric("kl")))
    pd.testing.assert_frame_equal(*tables)


def test_parts_together_are_the_table_of_one_sweep(make_model, tokens):
    """Draws too; parts come from other processes, so that they are pickled."""
    model = make_model()

    def part(*names):
        drawn = {"drawn": draws(lambda seed: ablate.resample("0.1", tokens, seed=seed), 2)}
        variants = ablate.each(ablate.zero, heads("all", model)) | drawn
        chosen = {name: variants[name] for name in names or variants}
        return sweep(model, tokens, chosen, metric=by_row, draws=50, flips=50)

    parts = [part("0.0", "drawn"), part("1.1"), part("0.1", "0.2", "0.3", "1.0", "1.2", "1.3")]
    found, whole = SweepResult.concat(pickle.loads(pickle.dumps(parts))), part()
    keys = ["variant", "draw", "metric"]
    frames = [one.frame.sort_values(keys, ignore_index=True) for one in (found, whole)]
    pd.testing.assert_frame_equal(*frames, rtol=1e-9, atol=1e-12)
    pd.testing.assert_frame_equal(found.baseline, whole.baseline, rtol=1e-9)
    assert found.interventions == whole.interventions
    assert (frames[0]["p_adjusted"].dropna() > frames[0]["p_value"].dropna()).any()


def test_several_models_are_one_table_in_the_order_of_their_labels(make_model, tokens):
    """Each model's rows and baseline are those of its own sweep; only Holm's adjustment is over all."""
    models = {4000: make_model(1), "last": make_model(0), "100": make_model(2)}
    variants = ablate.each(ablate.zero, heads("0.0-3", models["last"]))
    alone = {label: sweep(one, tokens, variants, by_row, draws=50, flips=50) for label, one in models.items()}
    found = SweepResult.concat(alone)
    for table in ("frame", "baseline"):
        parts = [getattr(one, table).assign(checkpoint=str(label)) for label, one in alone.items()]
        same = pd.concat(parts, ignore_index=True).drop(columns="p_adjusted", errors="ignore")
        pd.testing.assert_frame_equal(getattr(found, table)[[*same]], same)
    assert found.frame["p_adjusted"].tolist() == holm_adjusted(found.frame["p_value"].to_numpy()).tolist()
    steps = SweepResult.concat({1000: alone["last"], 250: alone["100"]}).frame["checkpoint"]
    assert list(dict.fromkeys(steps)) == [1000, 250]
    mixed = SweepResult.concat([found, alone["last"]]).frame["checkpoint"]
    assert mixed.isna().tolist() == [False] * len(found.frame) + [True] * 4
    table = found.pivot("checkpoint", "heads")
    for label, one in alone.items():
        assert table.loc[str(label)].to_dict() == one.frame.set_index("head")["effect"].to_dict()


def test_parts_of_compare_have_no_engine_and_join_as_well(make_model, tokens):
    output = run(make_model(), tokens)
    given = {"double": 2 * output, "half": output / 2}
    whole = compare([(output, given)], by_row, draws=50, flips=50)
    parts = [compare([(output, {name: one})], by_row, draws=50, flips=50) for name, one in given.items()]
    pd.testing.assert_frame_equal(SweepResult.concat(parts).frame, whole.frame)


def by_row(output):
    return output[:, -1, 0]


def test_json_is_a_list_of_records_with_all_digits_and_null_for_what_is_missing(result, tmp_path):
    result = copy.deepcopy(result)
    result.frame.loc[0, "value"] = 2.1086419725e-14
    result.to_json(tmp_path / "table.json")
    records = json.loads((tmp_path / "table.json").read_text())
    assert list(records[0]) == list(COLUMNS)
    assert records[0]["position"] is None
    assert records[0]["value"] == 2.1086419725e-14
    assert records[0]["layer"] == 0
