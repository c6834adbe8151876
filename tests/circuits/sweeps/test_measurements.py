import numpy as np
import pytest

from circuits import CircuitsError
from circuits.statistics import Resampling
from circuits.sweeps.measurements import Measurements
from circuits.sweeps.table import Table


def per_example(sums, counts=None):
    sums = np.array(sums, float)
    return {"loss": (sums, np.ones_like(sums) if counts is None else np.array(counts, float))}


def test_runs_by_chunk_in_any_order():
    measured = Measurements([{"variant": "a"}, {"variant": "b"}], "fast")
    measured.begin(per_example([1, 2]))
    measured.add(1, per_example([5, 6], [2, 0]))
    measured.add(0, per_example([3, 4]))
    measured.begin(per_example([7]))
    measured.add(0, per_example([8]))
    measured.add(1, per_example([9]))
    sums, counts = measured.of("loss")
    assert sums.tolist() == [[1, 2, 7], [3, 4, 8], [5, 6, 9]]
    assert counts.tolist() == [[1, 1, 1], [1, 1, 1], [2, 0, 1]]


def test_a_lambda_has_no_name_of_its_own_in_messages():
    measured = Measurements([{"variant": "a"}], "naive")
    measured.begin({"metric": per_example([1, 2])["loss"]})
    with pytest.raises(
        CircuitsError, match=r"^metric: returned for the unedited model but not for variant 'a'$"
    ):
        measured.add(0, {})


def test_each_engine_has_its_own_unedited_run():
    """Rows come in the order of the variants, whichever engine ran them; the baseline's are those of plain forwards."""
    fast, naive = Measurements([{"variant": "b"}], "fast"), Measurements([{"variant": "a"}], "naive")
    for one, base in ((fast, [1.0, 3.0]), (naive, [2.0, 4.0])):
        one.begin(per_example(base))
        one.add(0, per_example([5, 7]))
    table = Table(Resampling(0, 10, 10))
    table.add([fast, naive])
    result = table.result({"a": [], "b": []}, {})
    shown = result.frame[["variant", "engine", "baseline", "effect"]].values.tolist()
    assert shown == [["a", "naive", 3.0, 3.0], ["b", "fast", 2.0, 4.0]]
    assert result.baseline["value"].tolist() == [3.0]
