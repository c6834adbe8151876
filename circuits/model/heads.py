"""Parses head specs: a spec is read once into a value without a model, and resolved when a model is at hand."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from circuits.errors import CircuitsError

if TYPE_CHECKING:
    from torch import nn

    from circuits.model.hooked_model import HookedModel
    from circuits.model.sites import SiteKind

SYNTAX = (
    '"all", "0.1" (layer.head), "2.3-5", "L0H1", "0.k1" (a key-value group), several joined by "," or "+", or a list '
    "of (layer, head)"
)

_DOTTED = re.compile(r"(\d{1,6})\.([kK]?)(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_LETTERED = re.compile(r"[Ll](\d{1,6})([HhKk])(\d{1,6})", re.ASCII)


class Head(NamedTuple):
    """One attention head. Both numbers count from 0."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True, order=True)
class KeyValueGroup:
    """One key-value head that several heads share (grouped-query attention). Both numbers count from 0."""

    layer: int
    group: int

    def __str__(self) -> str:
        return f"{self.layer}.k{self.group}"

    def serves(self, model: nn.Module | HookedModel) -> tuple[Head, ...]:
        """Returns the heads of a model (or of a `HookedModel`) that share these keys and values."""
        from circuits.model.hooked_model import HookedModel

        hooked = model if isinstance(model, HookedModel) else HookedModel(model)
        size = hooked.n_heads // hooked.key_value_heads
        return tuple(Head(self.layer, self.group * size + one) for one in range(size))


AnyHead = Head | KeyValueGroup
#: "all", "0.1", "2.3-5, L0H1", a `Head`, pairs (layer, head), a list of them.
HeadsLike = str | AnyHead | Iterable[str | AnyHead | tuple[int, int]] | None


def index_on_head_axis(head: AnyHead) -> int:
    """Returns the place on the head axis of an activation."""
    return head.head if isinstance(head, Head) else head.group


def head_or_kv_group_at_index(kind: SiteKind, layer: int, index: int, hooked: HookedModel) -> AnyHead:
    """Returns what stands at a place on the head axis of a site: a head, or a key-value group."""
    return KeyValueGroup(layer, index) if hooked.has_kv_groups(kind) else Head(layer, index)


def format_head_label(one: AnyHead, hooked: HookedModel, site: str = "") -> str:
    """Returns the label for tables, with a site where that is given: "0.1", "0.1.q", "0.k1.k (heads 2,3)"."""
    label = f"{one}.{site}" if site else str(one)
    if isinstance(one, Head):
        return label
    return f"{label} (heads {','.join(str(head.head) for head in one.serves(hooked))})"


@dataclass(frozen=True)
class HeadSpec:
    """A choice of heads not yet tied to a model. `heads` is None for "all"; `text` is what the user wrote.

    Attributes:
        others: whether it is all heads of the model but these.
    """

    text: str = field(compare=False)
    heads: tuple[AnyHead, ...] | None
    others: bool = False

    def __post_init__(self) -> None:
        if self.heads == ():
            raise CircuitsError(f"heads {self.text}: an empty choice; write {SYNTAX}")

    def resolve(self, hooked: HookedModel) -> tuple[AnyHead, ...]:
        """Returns the heads in `hooked`; raises an error that repeats the spec if one of them does not exist there."""
        for one in self.heads or ():
            is_group = isinstance(one, KeyValueGroup)
            if is_group and hooked.key_value_heads == hooked.n_heads:
                raise CircuitsError(
                    f"heads {self.text}: no key-value group {one}: each head of this model has keys and values of its "
                    f"own; write {Head(one.layer, index_on_head_axis(one))}"
                )
            what = "key-value group" if is_group else "head"
            count = hooked.key_value_heads if is_group else hooked.n_heads
            if not (0 <= one.layer < hooked.n_layers and 0 <= index_on_head_axis(one) < count):
                raise CircuitsError(
                    f"heads {self.text}: no {what} {one}: the model has "
                    f"layers 0-{hooked.n_layers - 1} and {what}s 0-{count - 1}"
                )
        if self.heads is not None and not self.others:
            return self.heads
        every = tuple(Head(x, y) for x in range(hooked.n_layers) for y in range(hooked.n_heads))
        if self.heads is None:
            return every
        if rest := tuple(head for head in every if head not in self.heads):
            return rest
        raise CircuitsError(f"heads {self.text}: these are all heads of the model, so there are no others")

    def resolve_on_axis(self, kind: SiteKind, hooked: HookedModel) -> tuple[AnyHead, ...]:
        """Returns what the spec names on the head axis of a site, which under grouped-query attention is key-value
        groups at k and v, and heads elsewhere; raises an error that names the other where a spec has the wrong one.
        """
        groups = hooked.has_kv_groups(kind)
        if self.heads is None:
            return tuple(
                head_or_kv_group_at_index(kind, layer, index, hooked)
                for layer in range(hooked.n_layers)
                for index in range(hooked.head_count(kind))
            )
        resolved = self.resolve(hooked)
        for one in resolved:
            if isinstance(one, Head) and groups:
                shared = KeyValueGroup(one.layer, one.head * hooked.key_value_heads // hooked.n_heads)
                raise CircuitsError(
                    f"site {kind.name}: head {one} shares key-value group {shared} "
                    f"({_format_served_heads(shared, hooked)}) and cannot be named there alone; write {shared}"
                )
            if isinstance(one, KeyValueGroup) and not groups:
                raise CircuitsError(
                    f"site {kind.name}: key-value group {one} is at k and v only; it serves "
                    f"{_format_served_heads(one, hooked)}: name those"
                )
        return resolved

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
        # Not above: it imports torch, which text is read without.
        from circuits.frozen_tensors_and_positions import to_tensor_if_array

        spec = to_tensor_if_array(spec, "heads")
        spec = spec.tolist() if hasattr(spec, "tolist") else spec
    if isinstance(spec, KeyValueGroup) or (_is_pair(spec) and isinstance(spec, tuple)):
        spec = [spec]
    if isinstance(spec, str) and spec.strip().lower() == "all":
        return HeadSpec(text, None)
    if not isinstance(spec, Iterable):
        raise CircuitsError(f"heads {text}: not a head spec; write {SYNTAX}")
    parsed: list[AnyHead] = []
    for item in [spec] if isinstance(spec, str) else spec:
        if _is_pair(item):
            parsed.append(Head(*map(operator.index, item)))
        elif isinstance(item, KeyValueGroup):
            parsed.append(item)
        elif isinstance(item, str) and item.strip().lower() != "all":
            parsed += [
                head for part in re.split(r"[,+]", item) for head in _parse_heads_part(part.strip(), text)
            ]
        else:
            raise CircuitsError(f"heads {text}: cannot read {item!r} as a head; write {SYNTAX}")
    return HeadSpec(text, tuple(dict.fromkeys(parsed)))


def looks_like_heads(text: str) -> bool:
    """Tells whether a string is meant as heads rather than as a site: digits first, or "L0H1", "L0K1", or "all"."""
    return bool(re.match(r"\s*(\d|[Ll]\d+[HhKk]|all\s*$)", text)) or not text.strip()


def is_heads_like(given: Any) -> bool:
    """Tells whether this is meant as heads: text that looks like them, heads themselves, or a list or tuple of such."""
    if isinstance(given, str):
        return looks_like_heads(given)
    if isinstance(given, tuple | list):
        return _is_pair(given) or (bool(given) and all(map(is_heads_like, given)))
    return isinstance(given, KeyValueGroup | HeadSpec) or hasattr(given, "tolist")


@overload
def heads(spec: Literal["all"], model: nn.Module) -> tuple[Head, ...]: ...
@overload
def heads(spec: HeadsLike, model: nn.Module) -> tuple[AnyHead, ...]: ...
def heads(spec: HeadsLike, model: nn.Module) -> tuple[AnyHead, ...]:
    """Returns the heads that `spec` names in `model`, 0-based, without repeats, never empty.

    `spec` is "all", "0.1, 2.3-5" (layer.head, a range of heads with its end included), "L0H1", "0.1+0.2",
    or a list of (layer, head). Where heads share keys and values (grouped-query attention), "0.k1" or "L0K1" is
    key-value group 1 of layer 0, a `KeyValueGroup`, which edits at k and v and receivers of paths take. Raises
    `CircuitsError` for text that is not a spec and for a head or group the model lacks.
    """
    from circuits.model.hooked_model import HookedModel

    return parse_heads(spec).resolve(HookedModel(model))


def _format_served_heads(group: KeyValueGroup, hooked: HookedModel) -> str:
    served = group.serves(hooked)
    return f"head{'s' * (len(served) > 1)} {','.join(map(str, served))}"


def _parse_heads_part(part: str, text: str) -> list[AnyHead]:
    kinds: dict[bool, Callable[[int, int], AnyHead]] = {True: KeyValueGroup, False: Head}
    if match := _LETTERED.fullmatch(part):
        return [kinds[match[2] in "kK"](int(match[1]), int(match[3]))]
    match = _DOTTED.fullmatch(part)
    if match is None:
        raise CircuitsError(f"heads {text}: cannot read {part!r} as a head; write {SYNTAX}")
    layer, first = int(match[1]), int(match[3])
    last = int(match[4]) if match[4] else first
    if last < first or last - first > 4096:
        raise CircuitsError(f"heads {text}: {part!r} is not a range of heads; write the smaller number first")
    return [kinds[bool(match[2])](layer, number) for number in range(first, last + 1)]


def _is_pair(item: Any) -> bool:
    """Tells whether this is a list or tuple of two whole numbers."""
    if not isinstance(item, tuple | list) or len(item) != 2 or any(isinstance(x, bool) for x in item):
        return False
    try:
        for x in item:
            operator.index(x)
    except TypeError:
        return False
    return True
