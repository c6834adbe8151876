"""Tells which positions a run of the model computes while it generates, with and without a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import (
    Positions,
    Snapshot,
    Span,
    parse_positions_or_span,
    positions_to_mask,
    to_tensor_if_array,
)
from circuits.model.hooks import Handle, Handles, MethodWrapper
from circuits.model.prompts_with_mask import Prompts, positions_from_mask

#: The methods of a model, or of the one that it wraps, that call it once for each new token.
METHODS = ("generate", "generate_stream", "hf_generate")
#: The arguments of a call that carry keys and values of earlier positions.
CACHES = ("past_kv_cache", "past_key_values", "past_kv_cache_entry")


def find_key_value_cache(given: Mapping[str, Any]) -> Any:
    """Returns the key-value cache among the arguments of a call by name, an empty one too; None where there is none."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def past_length(given: Mapping[str, Any]) -> int:
    """Returns the number of positions that come before those of a call, whose arguments are given by name."""
    cache = find_key_value_cache(given)
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    entry = cache if hasattr(cache, "past_keys") else cache[0]
    if hasattr(entry, "past_keys"):
        return int(entry.past_keys.shape[1])
    return int(entry[0].shape[-2])


@dataclass(frozen=True)
class DecodeStep:
    """The positions of one run, counted from the first of the prompt.

    Attributes:
        start: the first of them; those before are in the key-value cache.
        prompt: the number of the prompt's; None: all of the run's are the prompt's.
        open: whether other runs may go on from this one.
        whole: whether it is known which of the run's are the prompt's.
        real: the mask of padding, of those before the run too, bool [batch pos], true at tokens; None where there is
            none. `start` and `prompt` count its columns.
    """

    start: int = 0
    prompt: int | None = None
    open: bool = False
    whole: bool = True
    real: Tensor | None = field(default=None, compare=False)

    @property
    def own_mask(self) -> Tensor | None:
        """The mask of the run's own positions, bool [batch pos]; None where there is no padding."""
        return None if self.real is None else self.real[:, self.start :]

    def own_positions(self, length: int) -> Tensor:
        """Returns the position of each of the run's columns in its row's own tokens, [batch or 1, length]."""
        if self.real is None:
            return torch.arange(self.start, self.start + length)[None]
        return positions_from_mask(self.real)[:, self.start :]

    def position_mask(
        self,
        positions: Positions | Span | Snapshot | None,
        length: int,
        what: str,
        rows: slice | Tensor | None = None,
        batch: int = 1,
    ) -> Tensor:
        """Returns a boolean mask, true at `positions`, of a run of `length` positions: [length], or [batch length]
        where rows differ: positions count in each row's own tokens, and none of them is padding. `rows` of a whole
        batch of `batch` run (None: all).
        """
        if positions is None:
            return torch.ones(length, dtype=torch.bool) if self.own_mask is None else self.own_mask
        if isinstance(positions, Snapshot):
            chosen = self._cut_mask_to_run(positions.tensor, length, what, rows, batch)
            return chosen if self.own_mask is None else chosen.to(self.own_mask.device) & self.own_mask
        if isinstance(positions, tuple) and not self.open:
            return positions_to_mask(positions, length, what, self.real)
        columns, here = self._prompt_length(positions, length, what), self.own_positions(length)
        # The lengths of the prompts, [batch or 1, 1].
        prompts = (
            torch.tensor([[columns]]) if self.real is None else self.real[:, :columns].sum(1, keepdim=True)
        )
        if isinstance(positions, Span):
            if positions.name == "new" and not self.open:
                raise CircuitsError(
                    f'{what}: positions="new" are those that model.generate adds, and this run generates nothing'
                )
            first, last = positions.start_and_stop(prompts)
            chosen = (here >= first) & (here < last)
        else:
            shortest, of = int(prompts.min()), "prompt" if self.real is None else "shortest prompt"
            if min(positions) < -shortest:
                raise CircuitsError(
                    f"{what}: no position {min(positions)}: the {of} has positions 0-{shortest - 1}"
                )
            numbers = torch.tensor(positions, device=here.device)
            absolute = torch.where(numbers < 0, prompts + numbers, numbers)
            chosen = (here[..., None] == absolute[:, None]).any(-1)
        return chosen[0] if self.own_mask is None else chosen & self.own_mask

    def _cut_mask_to_run(
        self, mask: Tensor, length: int, what: str, rows: slice | Tensor | None, batch: int
    ) -> Tensor:
        """Returns a mask over the prompt, [pos] or [batch pos], cut to the run, false beyond the prompt."""
        prompt = self._prompt_length(None, length, "a mask")
        if mask.shape[-1] != prompt or (mask.ndim == 2 and len(mask) != batch):
            axes, run = ("[batch pos]", [batch, prompt]) if mask.ndim == 2 else ("[pos]", [prompt])
            raise CircuitsError(f"{what}: the mask is {axes} = {list(mask.shape)}, the run is {run}")
        mask = mask if mask.ndim == 1 or rows is None else mask[rows]
        if not self.open:
            return mask
        part = mask[..., self.start : self.start + length]
        return torch.nn.functional.pad(part, (0, length - part.shape[-1]))

    def _prompt_length(self, positions: Positions | Span | None, length: int, what: str) -> int:
        relative = positions is None or (
            positions.depends_on_length if isinstance(positions, Span) else min(positions) < 0
        )
        if relative and not self.whole:
            raise CircuitsError(
                f"{what}: a call with a key-value cache and {length} positions may hold prompt and new ones; give "
                "positions from 0, or a slice"
            )
        return self.start + length if self.prompt is None else self.prompt


#: A run on its own: all its positions are the prompt's.
WHOLE = DecodeStep()


def parse_position_mask(positions: Any, prompts: Prompts, label: str) -> Tensor:
    """Returns the entries at some positions, bool [batch pos] in the layout of the prompts; refuses those of no prompt.

    Args:
        positions: numbers, a slice or a `Span`, which count in each prompt's own tokens; or a mask, [batch pos],
            [batch 1] or [pos]; None: all.
    """
    given, (batch, length) = to_tensor_if_array(positions, label), prompts.shape[:2]
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        if tuple(given.shape) not in ((length,), (batch, length), (batch, 1)):
            raise CircuitsError(
                f"{label}: a mask is boolean, [batch pos] = {[batch, length]}, [batch 1] or [pos]; got "
                f"{list(given.shape)}"
            )
        return given.detach().cpu().expand(batch, length)
    chosen = given if isinstance(given, Span) else parse_positions_or_span(given, label)
    run = replace(WHOLE, real=prompts.real if prompts.padded else None)
    found = run.position_mask(chosen, length, label).expand(batch, length)
    if not bool(found.any()):
        raise CircuitsError(f"{label}: no prompt has a position in {chosen}")
    return found


@dataclass
class GenerationTracker:
    """Follows the runs of a model inside a block: which of them go on from an earlier one. Several generations, or
    loops with a cache each, may take turns.

    Attributes:
        end: the number of positions up to the last of any open run.
        open_runs: the length of the prompt and the end of the last run, by generation or by the id of a loop's cache;
            the latest last.
    """

    end: int = 0
    open_runs: dict[object, tuple[int | None, int | None]] = field(default_factory=dict)

    def next_step(
        self, model: nn.Module, given: Mapping[str, Any], length: int | None, token_mask: Tensor | None = None
    ) -> DecodeStep:
        """Returns the step of a run of `length` positions (None: unknown) with these arguments by name."""
        generation, cache, start = generation_id(model), find_key_value_cache(given), past_length(given)
        own = generation or (None if cache is None else id(cache))
        before = self.open_runs.get(own)
        if generation is None and (before is None or before[1] != start):
            # A cache not seen before may come from a run without one, or be a copy.
            runs = [one for key, one in self.open_runs.items() if key is None or isinstance(key, int)]
            before = next((one for one in reversed(runs) if start and one[1] == start), None)
        earlier = 0 if generation is None or before is None else before[1] or 0
        if cache is not None and not start and length is not None and length < earlier:
            raise CircuitsError(
                "the key-value cache of this generation stays empty, so that a new token sees none before it (bridges "
                "under transformers 5.24 do this): give use_past_kv_cache=False, or install transformers<5.24"
            )
        end = None if length is None else start + length
        prompt = end if before is None else before[0]
        self.open_runs.pop(own, None)
        self.open_runs[own] = prompt, end
        if generation is None and cache is None:
            return DecodeStep(real=token_mask)
        # With padding, a position has come once it has in all rows.
        self.end = max(self.end, (end or 0) if token_mask is None else int(token_mask.sum(1).min()))
        whole = not (before is not None and start > 0 and length != 1)
        return DecodeStep(start, prompt, open=True, whole=whole, real=token_mask)


# The calls of `METHODS` under way by model, the outermost first: one method may call another.
_under_way: WeakKeyDictionary[nn.Module, list[object]] = WeakKeyDictionary()


def generation_id(model: nn.Module) -> object:
    """Returns an object that stands for the generation under way, the same in all its runs; None where there is
    none.
    """
    generations = _under_way.get(model)
    return generations[0] if generations else None


@contextmanager
def _mark_generation(model: nn.Module, generation: object) -> Iterator[None]:
    under = _under_way.setdefault(model, [])
    under.append(generation)
    try:
        yield
    finally:
        under.remove(generation)


def _mark_streamed_steps(model: nn.Module, generation: object, steps: Any) -> Iterator[Any]:
    while True:
        with _mark_generation(model, generation):
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step


def watch_generations(model: nn.Module) -> Handle:
    """Lets `generation_id` know of the model's generations until the handle is removed."""

    def mark_around_call(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        generation = object()
        with _mark_generation(model, generation):
            result = method(*args, **kwargs)
        streamed = isinstance(result, GeneratorType)
        return _mark_streamed_steps(model, generation, result) if streamed else result

    inner = vars(model).get("original_model")  # a bridge does not register the model it wraps
    owners = [model, *([inner] if isinstance(inner, nn.Module) else [])]
    return Handles(
        *(
            MethodWrapper(owner, name, mark_around_call)
            for owner in owners
            for name in METHODS
            if callable(getattr(type(owner), name, None))
        )
    )
