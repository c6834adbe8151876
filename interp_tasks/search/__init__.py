"""Hyper-parameter search: :func:`search` trains a run for every trial, and Optuna says what to try next.

``search`` and ``SearchResult`` load on first use; :class:`Plan` and what it is made of need neither torch nor Optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_tasks.search.plan import Plan, make_plan
from interp_tasks.search.space import Choices, Range, Space

if TYPE_CHECKING:
    from interp_tasks.search.result import SearchResult
    from interp_tasks.search.study import search

__all__ = ["Choices", "Plan", "Range", "SearchResult", "Space", "make_plan", "search"]

_HOMES = {"search": "interp_tasks.search.study", "SearchResult": "interp_tasks.search.result"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
