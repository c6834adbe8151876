"""Hyper-parameter search: :func:`search` trains a run for every trial, and Optuna says what to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_tasks.search.search_plan import SearchPlan, make_plan

if TYPE_CHECKING:
    from interp_tasks.search.run_search import SearchResult, search

__all__ = ["SearchPlan", "SearchResult", "make_plan", "search"]


def __getattr__(name: str) -> Any:
    # A plan needs neither torch nor Optuna.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from interp_tasks.search import run_search

    return getattr(run_search, name)
