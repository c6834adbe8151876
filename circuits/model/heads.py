"""Parses head specs: a spec is read once into a value without a model, and resolved when a model is at hand."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from circuits.errors import CircuitsError

if TYPE_CHECKING:
    from circuits.model.surface import Surface

SYNTAX = (
    '"all", "0.1" (layer.head), "2.3-5", "L0H1", several joined by "," or "+", or a list of (layer, head)'
)

_DOTTED = re.compile(r"(\d{1,6})\.(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_LETTERED = re.compile(r"[Ll](\d{1,6})[Hh](\d{1,6})", re.ASCII)


class Head(NamedTuple):
    """One attention head. Both numbers count from 0."""

    layer: int
    head: int

    @property
    def label(self) -> str:
        return f"L{self.layer}H{self.head}"

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True)
class HeadSpec:
    """A choice of heads not yet tied to a model. `heads` is None for "all"; `text` is what the user wrote.

    Attributes:
        others: whether it is all heads of the model but these.
    """

    text: str = field(compare=False)
    heads: tuple[Head, ...] | None
    others: bool = False

    def __post_init__(self) -> None:
        if self.heads == ():
            raise CircuitsError(f"heads {self.text}: an empty choice; write {SYNTAX}")

    def resolve(self, surface: Surface) -> tuple[Head, ...]:
        """Returns the heads in `surface`; raises an error that repeats the spec if one of them does not exist there."""
        every = tuple(Head(x, y) for x in range(surface.n_layers) for y in range(surface.n_heads))
        if self.heads is None:
            return every
        for head in self.heads:
            if not (0 <= head.layer < surface.n_layers and 0 <= head.head < surface.n_heads):
                raise CircuitsError(
                    f"heads {self.text}: no head {head}: the model has "
                    f"layers 0-{surface.n_layers - 1} and heads 0-{surface.n_heads - 1}"
                )
        if not self.others:
            return self.heads
        rest = tuple(head for head in every if head not in self.heads)
        if not rest:
            raise CircuitsError(
                f"heads {self.text}: these are all heads of the model, so there are no others"
            )
        return rest

    def describe(self) -> str | list[str] | dict[str, list[str]]:
        named = "all" if self.heads is None else [str(head) for head in self.heads]
        return {"all but": list(named)} if self.others else named

    def __str__(self) -> str:
        text = "all" if self.heads is None else ",".join(map(str, self.heads))
        return f"all but {text}" if self.others else text


def parse_heads(spec: Any) -> HeadSpec:
    """Reads a head spec without a model. Accepts what `heads` accepts; order is kept, repeats are dropped."""
    if isinstance(spec, HeadSpec):
        return spec
    text = repr(spec)
    if hasattr(spec, "tolist"):
        spec = _dense(spec)
    if isinstance(spec, str):
        if spec.strip().lower() == "all":
            return HeadSpec(text, None)
        parsed = [head for part in re.split(r"[,+]", spec) for head in _parse_part(part.strip(), text)]
    elif _is_pair(spec) and isinstance(spec, tuple):
        parsed = [Head(*map(operator.index, spec))]
    elif isinstance(spec, Iterable):
        parsed = []
        for item in spec:
            if _is_pair(item):
                parsed.append(Head(*map(operator.index, item)))
            elif isinstance(item, str) and item.strip().lower() != "all":
                parsed.extend(parse_heads(item).heads or ())
            else:
                raise CircuitsError(f"heads {text}: cannot read {item!r} as a head; write {SYNTAX}")
    else:
        raise CircuitsError(f"heads {text}: not a head spec; write {SYNTAX}")
    return HeadSpec(text, tuple(dict.fromkeys(parsed)))


def _dense(spec: Any) -> Any:
    """Returns an array or a tensor as a list. Imports torch only here, so that text is read without it."""
    from circuits.tensors import as_dense_tensor

    dense = as_dense_tensor(spec, "heads")
    return dense.tolist() if hasattr(dense, "tolist") else dense


def looks_like_heads(text: str) -> bool:
    """Tells whether a string is meant as heads rather than as a site: digits first, or "L0H1", or "all"."""
    return bool(re.match(r"\s*(\d|[Ll]\d+[Hh]|all\s*$)", text)) or not text.strip()


def heads(spec: Any, model: Any) -> tuple[Head, ...]:
    """Returns the heads that `spec` names in `model`, 0-based, without repeats, never empty.

    `spec` is "all", "0.1, 2.3-5" (layer.head, a range of heads with its end included), "L0H1", "0.1+0.2",
    or a list of (layer, head). Raises `CircuitsError` for text that is not a spec and for a head the model
    lacks.
    """
    from circuits.model.surface import Surface

    return parse_heads(spec).resolve(Surface.of(model))


def _parse_part(part: str, text: str) -> list[Head]:
    if match := _LETTERED.fullmatch(part):
        return [Head(int(match[1]), int(match[2]))]
    match = _DOTTED.fullmatch(part)
    if match is None:
        raise CircuitsError(f"heads {text}: cannot read {part!r} as a head; write {SYNTAX}")
    layer, first = int(match[1]), int(match[2])
    last = int(match[3]) if match[3] else first
    if last < first or last - first > 4096:
        raise CircuitsError(f"heads {text}: {part!r} is not a range of heads; write the smaller number first")
    return [Head(layer, head) for head in range(first, last + 1)]


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2 and all(map(_is_number, item))


def _is_number(x: Any) -> bool:
    try:
        operator.index(x)
    except TypeError:
        return False
    return not isinstance(x, bool)
