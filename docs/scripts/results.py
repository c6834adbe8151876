"""The tables of headlines on the pages of results, made from the measurements that ship."""

from __future__ import annotations

from functools import cache

from interp_tasks.reproduction import Reproduction, reproduce
from interp_tasks.reproduction.verdict_text import headlines_markdown


@cache
def judged(name: str) -> Reproduction:
    return reproduce(name)


def table(name: str) -> str:
    """Returns what a paper stands on: published, ours, seeds, interval, verdict, the untrained model's number.

    Where the runs of the published configuration are not those of our own table, they have a column of their own.
    """
    found = judged(name)
    outcomes = found.frame.to_dict("records")
    runs = {each["run"] for each in outcomes}
    published_size = {
        each["claim"]: each
        for each in reproduce(name, preset="paper").frame.to_dict("records")
        if each["headline"] and each["run"] not in runs and each["verdict"] != "not run"
    }
    return headlines_markdown(found.paper, outcomes, published_size)
