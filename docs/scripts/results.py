"""The tables of headlines on the pages of results, made from the measurements that ship."""

from __future__ import annotations

from functools import cache

from interp_tasks.reproduction import Reproduction, reproduce
from interp_tasks.reproduction.page import headlines_markdown


@cache
def judged(name: str) -> Reproduction:
    return reproduce(name)


def table(name: str) -> str:
    """Returns what a paper stands on: published, ours, seeds, interval, verdict, the untrained model's number."""
    found = judged(name)
    return headlines_markdown(found.paper, found.frame().to_dict("records"))
