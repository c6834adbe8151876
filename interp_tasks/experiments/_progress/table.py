"""The names of the rows of ``progress``, and how people see them: the splits side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.pages import Column, number, signed

if TYPE_CHECKING:
    import pandas

LOSS, ACCURACY = "loss", "accuracy"
#: As they stand side by side; the first is all inputs.
SPLITS = ("grid", "train", "test")
#: What was done to the logits.
NONE = "none"
RESTRICTED, EXCLUDED = "restricted to key frequencies", "key frequencies excluded"
ONE_EXCLUDED, WORST = "one key frequency excluded", "worst single frequency excluded"
FITTED = "cosines of key frequencies"
#: Fitted on other inputs of the same split than those that are scored; the published ones are fitted on all inputs.
RESTRICTED_HELD_OUT, FITTED_HELD_OUT = f"{RESTRICTED}, held out", f"{FITTED}, held out"
#: Of the model as it is.
COEFFICIENT = "coefficient of cos w(r - c)"
EXPLAINED = "variance of logits explained by cosines"
EXPLAINED_CLASSES = "variance between classes explained by cosines"
ALL_WEIGHTS = "all weights"
FOLLOWS = "variance of logits that follows the answer"
GINI, SQUARES, KEYS = "gini", "sum of squared weights", "key frequencies"
NORM, NORM_IN_EMBEDDING, RESIDUAL = "norm in W_L", "norm in W_E", "residual of W_L"
OF_CLUSTER = "power of W_L in the frequency of its neurons"
ON_WAVE, AMPLITUDE = "variance explained by the wave", "amplitude"
KEYS_OF_EMBEDDING, AMONG = "frequencies of W_E", "share of key frequencies among those of W_E"
ATTENTION_FIT, ATTENTION_FREE = "attention explained", "attention explained, digits free"
ATTENTION_SELF, FREQUENCY = "attention to itself", "frequency of attention"
WAVES_FOR_ATTENTION = "attention: waves of the digits alone"
#: Of the phases.
BOUNDARY, HALF = "boundary of phases", "half of its way"
STEP = "step"


def of_frequency(answer: str, key: int) -> str:
    return f"{answer}, frequency {key}"


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Splits as columns. Accuracies are of the unedited model alone; of checkpoints before a run's last one only what
    is said of whole answers."""
    import pandas

    last = frame.groupby("run", dropna=False)["step"].transform("max") == frame["step"]
    is_whole = ~frame["variant"].str.contains(", frequency ") & (
        (frame["metric"] == LOSS) | (frame["metric"] == GINI) | (frame["variant"] == ALL_WEIGHTS)
    )
    rows: dict[tuple[Any, ...], dict[Any, Any]] = {}
    plain = (frame["metric"] != ACCURACY) | (frame["intervention"] == NONE)
    tensors = (frame["metric"] == SQUARES) & (frame["variant"] != ALL_WEIGHTS)
    for row in frame[(last | is_whole) & plain & ~tensors].to_dict("records"):
        head = "" if pandas.isna(row["head"]) else f", head {row['layer']}.{row['head']}"
        done = "" if row["intervention"] == NONE else f", {row['intervention']}"
        about = {**row, "variant": row["variant"] + head, "metric": row["metric"] + done}
        table_row = rows.setdefault(
            (row["ref"], about["variant"], about["metric"]), about | dict.fromkeys(SPLITS, math.nan)
        )
        table_row[row["split"]] = row["value"]
    return pandas.DataFrame(list(rows.values()))


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``."""
    columns = [Column("", "variant"), Column("measure", "metric")]
    splits = [split for split in SPLITS if split == SPLITS[0] or (frame["split"] == split).any()]
    return [*columns, *(Column(split, split, shown(split)) for split in splits)]


def shown(key: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        if math.isnan(row[key]):
            return ""
        return signed(row[key]) if row["metric"].startswith("change") else number(row[key])

    return text
