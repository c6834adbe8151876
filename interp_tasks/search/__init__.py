"""Hyper-parameter search: :func:`search` trains a run for every trial, and Optuna says what to try next.

``search`` and ``SearchResult`` load on first use; a :class:`Plan` needs neither torch nor Optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_tasks.search.plan import Plan, make_plan

if TYPE_CHECKING:
    from interp_tasks.search.study import SearchResult, search

__all__ = ["Plan", "SearchResult", "make_plan", "search"]


def __getattr__(name: str) -> Any:
    if name not in ("SearchResult", "search"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = value = getattr(import_module("interp_tasks.search.study"), name)
    return value
