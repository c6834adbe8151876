"""What calls give, numbers and words, compared with what they gave when `pytest --keep` was last run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from plotly.graph_objects import Figure

from circuits import CircuitsError

FILE = Path(__file__).parents[1] / "data" / "kept_results.json"
KEPT = json.loads(FILE.read_text(encoding="utf-8"))


def shown(x: Any, depth: int = 0) -> Any:
    """Returns what JSON can hold of a result: its text, fields and properties, and a summary of its arrays."""
    if isinstance(x, str):
        return without_places(" ".join(x.split()))
    if x is None or isinstance(x, bool | int | float):
        return x
    if isinstance(x, pd.DataFrame):
        return {str(name): summary(x[name].to_numpy()) for name in x} | {"index": str(x.index)[:200]}
    if isinstance(x, torch.Tensor | np.ndarray | np.generic):
        return summary(np.asarray(x) if isinstance(x, np.generic) else x)
    if isinstance(x, Figure):
        texts = [
            x.layout.title.text,
            x.layout.title.subtitle.text,
            *(note.text for note in x.layout.annotations),
        ]
        axes = [axis.title.text for axis in (*x.select_xaxes(), *x.select_yaxes())]
        return [texts, axes, [drawn(one) for one in x.data]]
    if isinstance(x, torch.nn.Module) or callable(x):
        return type(x).__name__
    if hasattr(x, "items"):
        return {str(key): shown(value, depth + 1) for key, value in x.items()}
    if isinstance(x, list | tuple | set | frozenset):
        return [shown(one, depth + 1) for one in x][:40] if depth < 3 else str(x)[:200]
    return {"text": shown(repr(x)[:1500])} | (attributes(x, depth + 1) if depth < 2 else {})


def drawn(trace: Any) -> Any:
    numbers = [summary(np.asarray(trace[name], dtype=object)) for name in ("x", "y", "z") if name in trace]
    return [trace.type, trace.name, str(trace["text"])[:200] if "text" in trace else None, *numbers]


def attributes(x: Any, depth: int) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else []
    kinds = property | cached_property
    computed = [name for name in dir(type(x)) if isinstance(getattr(type(x), name), kinds)]
    return {name: shown(getattr(x, name), depth) for name in fields + computed if name[0] != "_"}


def summary(x: Any) -> Any:
    """Returns type and shape, sum, norm and a random projection of an array; the different texts in it."""
    if isinstance(x, np.ndarray) and x.dtype == object:
        numbers = pd.to_numeric(pd.Series(x.flatten()), errors="coerce")
        texts = [str(one) for one in x.flatten() if not isinstance(one, int | float)]
        return [f"{len(x)}: {' '.join(dict.fromkeys(texts))}"[:300], *summary(numbers.to_numpy(float))]
    x = torch.as_tensor(x).detach()
    values = x.double().flatten()
    values = values[values.isfinite()]
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers = [float(values.sum()), float(values.norm()), float(weights @ values)]
    return [f"{x.dtype} {list(x.shape)}, {len(values)} finite", *numbers]


def differences(kept: Any, found: Any, at: str) -> list[str]:
    """Returns where two results differ by more than rounding."""
    if isinstance(kept, dict) and isinstance(found, dict) and kept.keys() == found.keys():
        return [one for key in kept for one in differences(kept[key], found[key], f"{at}.{key}")]
    if isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        pairs = zip(kept, found, strict=True)
        return [one for i, (a, b) in enumerate(pairs) for one in differences(a, b, f"{at}[{i}]")]
    if isinstance(kept, float) and isinstance(found, float):
        return [] if math.isclose(kept, found, rel_tol=1e-7, abs_tol=1e-9) else [f"{at}: {kept} -> {found}"]
    return [] if kept == found else [f"{at}: {kept!r} -> {found!r}"]


def lines(calls: str) -> list[str]:
    """Returns the calls of a table with one a line."""
    return [line for line in calls.splitlines() if line and line[0] != "#"]


def without_places(text: str) -> str:
    """Returns a text without what differs from run to run: folders of tests, and addresses in memory."""
    return re.sub(r"\S*/(tmp|pytest-of-)\S*/|0x[0-9a-f]{6,}", "", text)


def told(call: str, known: dict[str, Any]) -> Any:
    try:
        return shown(eval(call, known))
    except CircuitsError as error:
        return f"refused: {without_places(str(error))}"


def check(label: str, call: str, known: dict[str, Any], keep: bool) -> Any:
    """Makes a call, and compares what it gives with what is kept, or keeps it; returns it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = json.loads(json.dumps(told(call, known)))
    if keep:
        KEPT[f"{label}: {call}"] = found
        write()
    assert differences(KEPT[f"{label}: {call}"], found, "") == []
    return found


def write() -> None:
    """Writes what is kept, one call a line."""
    pairs = (f"{json.dumps(call)}: {json.dumps(KEPT[call], ensure_ascii=False)}" for call in sorted(KEPT))
    FILE.write_text("{\n" + ",\n".join(pairs) + "\n}\n", encoding="utf-8")
