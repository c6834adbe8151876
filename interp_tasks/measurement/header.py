"""What a command was asked to do, for the head of its printed table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Per experiment the settings that the head of its table names, with the value that goes without saying; ``None``
#: where none does.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "ablation": {"mode": None, "keys": None, "queries": "all"},
    "heads": {"mode": None, "keys": None, "queries": "all", "by_class": False, "least": 0, "random": 0},
    "transplant": {"source": None, "components": None, "layers": None},
    "patch": {"source": None, "site": None, "heads": None, "queries": "all", "by_class": False},
    "permute": {"draws": None, "what": ["all"]},
    "probe": {
        "method": None,
        "sites": ["resid_post"],
        "heads": None,
        "positions": None,
        "each_position": False,
        "intercept": False,
        "held_out": 0.25,
        "shuffles": 1,
    },
    "baseline": {"methods": [], "vary": "p_mask", "variants": []},
    "ood": {"vary": ["entries", "rank", "rows", "columns"], "method": None},
    "algorithm": {"methods": [], "entries": []},
    "attention": {"templates": "all", "queries": "read", "threshold": 0.5, "mask": None},
    "embeddings": {"largest": None},
    "weights": {},
    "drops": {"metric": None},
    "generalisation": {"level": 0.95, "against": []},
    "influence": {"shift": None, "redraw": False},
    "order": {"start": "plateau"},
    "gradients": {"start": 0},
    "neurons": {"site": None, "threshold": 0.85},
    "primes": {"draws": 20, "ablate": True},
    "prime-order": {"level": 0.95},
    "fourier": {"rule": None, "threshold": 0.85},
    "progress": {"rule": None, "keys": None, "answers": [], "kinds": []},
}
#: Settings whose option has another name.
OPTIONS = {"sites": "site", "templates": "template"}


def said(experiment: str, config: Mapping[str, Any]) -> list[str]:
    """``["mode uniform", "queries hidden"]``; of several results joined, what they have in common.

    Args:
        config: of a :class:`Result`.
    """
    each = [
        [
            phrase(name, part[name])
            for name, unsaid in SETTINGS.get(experiment, {}).items()
            if part.get(name) not in (None, unsaid)
        ]
        for part in config.get("parts", [config])
    ]
    return [one for one in each[0] if all(one in others for others in each)]


def phrase(name: str, value: Any) -> str:
    name = OPTIONS.get(name, name.replace("_", "-"))
    if value is True:
        return name
    if isinstance(value, (list, tuple)):
        return f"{name} {', '.join(map(str, value))}"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
