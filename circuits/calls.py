"""One call of the model under interventions, and the passes on the same inputs that some of them need first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions import Firing, Write
from circuits.modes import evaluating
from circuits.references import References, keep_in
from circuits.state import State, suspended
from circuits.surface import Surface

CACHED = "a key-value cache"


def unusual(kwargs: Mapping[str, Any]) -> str | None:
    """What, of a call's inputs, makes the model do something else than on its tokens alone, if anything does."""
    mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        return "padding"
    if places is not None and bool((places != torch.arange(places.shape[-1], device=places.device)).any()):
        return "position_ids"
    names = ("past_kv_cache", "past_key_values")
    return CACHED if any(kwargs.get(name) is not None for name in names) else None


@dataclass
class Call:
    """The inputs of one call of the model.

    `run` calls the model on them again, without any of our edits but those given, in eval mode, no gradients.
    """

    surface: Surface
    references: References
    state: State
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokens: Tensor | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict)
    _prepared: dict[int, Any] = field(default_factory=dict)

    def begin(self, writes: Sequence[Write], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is about to run on these inputs."""
        self.args, self.kwargs = args, kwargs
        self.tokens = self.surface.tokens_of(args, kwargs)
        self._known.clear()
        odd = unusual(kwargs)
        for write in writes:
            if odd is not None and write.replacement.references(write):
                raise CircuitsError(
                    f"{write.label}: this call has {odd}, which a clean pass on the tokens given would not have; patch "
                    "from activations cached with it, or run without"
                )
            if odd == CACHED and write.positions is not None:
                raise CircuitsError(
                    f"{write.label}: with {odd} positions are counted anew in every call; edit all of them, or run "
                    "without"
                )
        self._prepared = {id(write): write.replacement.prepare(self) for write in writes}

    def prepared(self, write: Write) -> Any:
        return self._prepared.get(id(write))

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What several writes of one intervention share is computed once in a call."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def run(self, writes: Sequence[Write], wanted: Iterable[str]) -> dict[str, Tensor]:
        """The activations at the hooks `wanted` under `writes` alone."""
        if unusual(self.kwargs) == CACHED:
            raise CircuitsError(
                f"a path needs passes on the run's own tokens, which {CACHED} would remember; run without"
            )
        alone = State(rows=self.state.rows, total=self.state.total)
        inner = Call(self.surface, self.references, alone, self.args, self.kwargs, self.tokens)
        seen: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for context in (suspended(self.surface.model), evaluating(self.surface.model), torch.no_grad()):
                stack.enter_context(context)
            for write in writes:
                stack.callback(self.surface.on_forward(write.hook, writer(write, inner, {})).remove)
            for hook in wanted:
                stack.callback(self.surface.on_forward(hook, keep_in(seen, hook)).remove)
            self.surface.model(*self.args, **self.kwargs)
        return seen


def writer(
    write: Write, call: Call, reads: dict[str, Tensor], fired: Callable[[], None] | None = None
) -> Callable[[Tensor], Tensor | None]:
    """The hook function that carries out one write."""
    references = {
        name: call.references[reference] for name, reference in write.replacement.references(write).items()
    }
    return partial(_replace, write, call, references, reads, fired)


def _replace(
    write: Write,
    call: Call,
    references: Mapping[str, Tensor],
    reads: dict[str, Tensor],
    fired: Callable[[], None] | None,
    current: Tensor,
) -> Tensor | None:
    state = call.state
    if state.suspended:
        return None
    selected = write.selected(current, state.rows, state.total)
    firing = Firing(
        write, selected, references, reads, call.prepared(write), call.tokens, state.rows, state.total
    )
    new = write.replacement.value(current, firing)
    if fired is not None:
        fired()
    return torch.where(selected, new, current)
