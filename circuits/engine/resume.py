"""Resumes runs of the model itself: a variant runs the blocks from its first edit on, many variants in one batch.

The model is called on the examples repeated once per variant, so that masks, positions and rotary tables are what it
makes of that batch. The blocks before the first edit hand on the residual stream of the clean pass; all others run as
they are, and nothing is computed from the weights here. Variants that start at one block share calls, each in its own
rows.

This is exact where a block reads nothing but the stream and what the model gives every block, and where examples do
not depend on each other. Both are checked: each block alone, on two examples whose streams are perturbed and on every
example as it is, must make what it makes in a whole run; and an unedited copy among edited ones gives the clean output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from circuits.engine.memory import Meter, call_in_tokens
from circuits.engine.receivers import Hearing, Sender
from circuits.engine.stacks import Stack, stacked
from circuits.engine.tails import NotResumed, Tail, TailRun, blocks_before, edited_rows, ends_block
from circuits.interventions.apply import attached, own_memory
from circuits.interventions.cuts.blocks import collecting
from circuits.interventions.forward_pass import ForwardPass
from circuits.interventions.reference_runs import References
from circuits.model.hooks import Function, Handle
from circuits.model.interrupts import contextmanager
from circuits.model.prompts import Prompts
from circuits.model.record import recording
from circuits.model.sites import KINDS
from circuits.model.state import State, running_rows, state_of
from circuits.model.surface import Surface

#: Largest difference that counts as rounding, relative to the largest entry.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Libraries whose hooks are part of a forward.
_KNOWN = ("transformer_lens.", "transformers.", "torch.utils.")


def resuming_pays(starts: Sequence[int], n_layers: int, examples: int) -> bool:
    """Tells whether the blocks that runs leave out are more than those that the checks of `Resume` run.

    Args:
        starts: by variant, the number of blocks that its run leaves out.
    """
    first = min(starts)
    alone = n_layers - max(1, first)
    # Of every example; and of the two whose streams are perturbed.
    checked = alone + (n_layers - first) + (n_layers + 2 * alone) * min(2, examples) / examples
    return sum(starts) > checked


@dataclass
class CleanPass:
    """A clean run of some examples: the arguments of the model, its output, and the stream that each block leaves."""

    prompts: Prompts
    call: tuple[tuple[Any, ...], Mapping[str, Any]]
    output: Tensor
    streams: dict[int, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.streams.values())


class Resume:
    """The engine for one model with its current weights. Raises `NotResumed` where it cannot be used at all."""

    def __init__(self, surface: Surface, prompts: Prompts, first: int) -> None:
        """
        Args:
            prompts: some examples; two of them are run here.
            first: the smallest number of blocks that a run leaves out.
        """
        refuse_hooks(surface.model)
        self.surface = surface
        self._blocks = [surface.block_module(layer) for layer in range(surface.n_layers)]
        self._forms: dict[int, Callable[[Tensor], Any]] = {}
        self._first = first
        #: Largest difference of blocks that ran alone, relative to the largest entry.
        self.rounding = 0.0
        #: Measures the memory until the first stack has been run.
        self.meter: Meter | None = None
        self._dtype = torch.float32
        self._check_perturbed(prompts[:: max(1, len(prompts) - 1)])

    @property
    def tolerance(self) -> float:
        """Up to which difference, relative to the largest entry, effects count as rounding.

        Half precision has too few digits for a fixed one: there it is a multiple of what was seen.
        """
        fixed = ROUNDING.get(self._dtype, 0.0)
        return fixed if torch.finfo(self._dtype).bits > 16 else min(fixed, 4 * self.rounding)

    def clean(self, prompts: Prompts) -> CleanPass:
        """Runs some examples through the model, and each block by itself on what the one before it has left."""
        clean = self._clean(prompts, lambda layer, stream: stream)
        for layer in range(max(1, self._first), len(self._blocks)):
            with self._skipping(range(layer), clean.streams[layer - 1], range(layer + 1, len(self._blocks))):
                made = self._made_by(layer, prompts)
            self._compare(made, clean.streams[layer], prompts, f"block {layer}")
        return clean

    def run(
        self,
        prompts: Prompts,
        rows: slice,
        total: int,
        tails: Sequence[Tail],
        references: References,
        clean: CleanPass,
        chunk: int,
    ) -> Iterator[tuple[list[tuple[Tail, bool]], Tensor]]:
        """Yields variants, with whether an activation was changed, and their outputs, one after the other.

        Args:
            prompts: those of `rows`, of `total` examples.
            chunk: tokens in one run, of all variants in it.
        """
        for together in self._lots(self.stackable(tails), chunk // prompts.shape[0] // prompts.shape[1]):
            changes = self._changes_of_senders(together, rows, total, references, clean)
            for stack in self.stacks(prompts, together, chunk):
                members = [together[at] for at in stack.members]
                run, output = self._run_stack(
                    prompts, rows, total, members, stack.start, references, clean, changes
                )
                size = len(prompts)
                unedited = [at for at, (tail, _) in enumerate(run) if tail.index < 0]
                for at in unedited:
                    what = "an unedited run beside edited ones"
                    self._compare(output[at * size : (at + 1) * size], clean.output, prompts, what)
                edges = [-1, *unedited, len(run)]
                for before, after in pairwise(edges):
                    if after > before + 1:
                        yield run[before + 1 : after], output[(before + 1) * size : after * size]
                del output
                self.measured()
        for tail in tails:
            if tail.alone:
                yield (
                    [(tail, True)],
                    self._run_tail(prompts, rows, total, tail, tail.start, references, clean),
                )
                self.measured()

    def _run_tail(
        self,
        prompts: Prompts,
        rows: slice,
        total: int,
        tail: Tail,
        start: int,
        references: References,
        clean: CleanPass,
    ) -> Tensor:
        """Runs one edit by itself from block `start` on; returns its output."""
        with (
            attached(self.surface, tail.plan, references),
            running_rows(self.surface.model, rows, total),
            self._resuming(start, clean, 1),
        ):
            return self._called(prompts)

    def measured(self) -> None:
        if self.meter is not None:
            self.meter.stop()

    def stackable(self, tails: Sequence[Tail]) -> list[Tail]:
        """Returns the variants that share runs, after an unedited one that shows whether rows depend on each other."""
        together = [tail for tail in tails if not tail.alone]
        return [Tail(-1, (), min(tail.start for tail in together)), *together] if together else []

    def stacks(self, prompts: Prompts, tails: Sequence[Tail], chunk: int) -> list[Stack]:
        """Returns which variants share a run: those whose blocks together are fewest."""
        tokens = prompts.shape[0] * prompts.shape[1]
        width = max(1, chunk // tokens)
        starts = [tail.start for tail in tails]
        found = stacked(starts, len(self._blocks), width, call_in_tokens(self.surface) / tokens)
        # The largest first, as its memory is measured.
        return sorted(found, key=lambda one: (-len(one.members), one.start))

    def _lots(self, tails: Sequence[Tail], width: int) -> Iterator[list[Tail]]:
        """Yields variants whose senders' changes are in memory together: as many of these as variants in a stack."""
        lot = [tail for tail in tails if tail.paths is None]
        groups: set[frozenset[Sender]] = set()
        cut = [(tail, tail.paths) for tail in tails if tail.paths is not None]
        # Those of one sender stand together.
        cut.sort(
            key=lambda each: min(
                (one.layer or 0, one.hook, one.heads or ()) for one in each[1].senders.values()
            )
        )
        for tail, paths in cut:
            if groups and len(groups | paths.groups) > width:
                yield lot
                lot, groups = [], set()
            lot.append(tail)
            groups |= paths.groups
        if lot:
            yield lot

    def _changes_of_senders(
        self, tails: Sequence[Tail], rows: slice, total: int, references: References, clean: CleanPass
    ) -> dict[frozenset[Sender], Tensor]:
        """Returns what the replacements of senders, by groups that some receiver is cut off from, change of the stream;
        each layer that has senders is run once, by itself.
        """
        every = [tail.paths for tail in tails if tail.paths is not None]
        senders = {sender: write for paths in every for sender, write in paths.senders.items()}
        groups = {group for paths in every for group in paths.groups}
        found: dict[frozenset[Sender], Tensor] = {}
        for layer in dict.fromkeys(write.layer for write in senders.values()):
            here = [sender for sender, write in senders.items() if write.layer == layer]
            numbers = {sender: number for number, sender in enumerate(here)}
            parts = {group: frozenset(numbers[one] for one in group if one in numbers) for group in groups}
            call = ForwardPass(self.surface, references, State(rows=rows, total=total))
            writes = [senders[sender] for sender in here]
            call.begin(writes, *clean.call)
            with collecting(self.surface, writes, filter(None, parts.values()), call) as collected:
                self._run_alone(layer, clean)
                changes = collected()
            for group, part in parts.items():
                if part:
                    found[group] = found[group] + changes[part] if group in found else changes[part]
        return found

    def _run_alone(self, layer: int | None, clean: CleanPass) -> None:
        """Runs one block on what the clean pass has left before it, or only the embeddings."""
        n_layers = len(self._blocks)
        with self._outermost():
            if layer is None:
                with self._skipping(range(0), None, range(n_layers)):
                    self.surface.call(clean.prompts)
                return
            stream = clean.streams[layer - 1] if layer else None
            with self._skipping(range(layer), stream, range(layer + 1, n_layers)):
                made = self._made_by(layer, clean.prompts)
        self._compare(made, clean.streams[layer], clean.prompts, f"block {layer}")

    def _run_stack(
        self,
        prompts: Prompts,
        rows: slice,
        total: int,
        tails: Sequence[Tail],
        start: int,
        references: References,
        clean: CleanPass,
        changes: Mapping[frozenset[Sender], Tensor],
    ) -> tuple[list[tuple[Tail, bool]], Tensor]:
        """Runs several edits in one pass from block `start` on; returns which changed anything, and all outputs."""
        members = [
            TailRun(tail, ForwardPass(self.surface, references, State(rows=rows, total=total)))
            for tail in tails
        ]
        for member in members:
            member.call.begin([w for writes in member.tail.writes.values() for w in writes], *clean.call)
        hooks = dict.fromkeys(hook for member in members for hook in member.hooks)
        places = [
            (at, one)
            for at, member in enumerate(members)
            if member.tail.paths is not None
            for one in member.tail.paths.heard
        ]
        hearing = Hearing(self.surface, len(prompts), places, changes)
        edits = {
            hook: hearing.unless_busy(partial(edited_rows, hook, members, len(prompts))) for hook in hooks
        }
        with self._edited(hearing, edits), self._resuming(start, clean, len(members)):
            output = self._called(prompts.repeated(len(members)))
        for member in members:
            if member.unseen:
                raise NotResumed(f"{min(member.unseen)} did not fire when its blocks ran alone")
        if hearing.unheard:
            hook = min(one.hook for _, one in hearing.unheard)
            raise NotResumed(f"{hook} did not fire when its blocks ran alone")
        for at in sorted(hearing.lost):
            size = len(prompts)
            output[at * size : (at + 1) * size] = self._run_tail(
                prompts, rows, total, tails[at], 0, references, clean
            )
        changed = [member.changed or at in hearing.changed for at, member in enumerate(members)]
        return list(zip(tails, changed, strict=True)), output

    @contextmanager
    def _edited(self, hearing: Hearing, edits: Mapping[str, Function]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(hearing.put_on().remove)
            for hook, edit in edits.items():
                stack.callback(self.surface.on_forward(hook, edit).remove)
            yield

    @contextmanager
    def _resuming(self, start: int, clean: CleanPass, copies: int) -> Iterator[None]:
        stream = None if start == 0 else clean.streams[start - 1]
        if stream is not None and copies > 1:
            stream = stream.repeat(copies, *(1,) * (stream.ndim - 1))
        with self._skipping(range(start), stream), self._outermost():
            yield

    @contextmanager
    def _skipping(self, before: range, stream: Tensor | None, after: range = range(0)) -> Iterator[None]:
        """Lets the blocks `before` hand on this stream, and those `after`, with the unembedding, whatever comes."""
        with ExitStack() as stack:
            unembed = getattr(self.surface.model, "unembed", None)
            if after and isinstance(unembed, nn.Module):
                stack.enter_context(_replaced(unembed, partial(_hand_on, _alone, None, None)))
            for layer in chain(before, after):
                point = None
                if layer == before.stop - 1:
                    # An edit of resid_post is one of what the block hands on.
                    hook = KINDS["resid_post"].hook.format(layer)
                    found = self.surface.hooks.get(hook)
                    point = found if found is not None and ends_block(self.surface, hook) else None
                given = None if layer in after else stream
                stack.enter_context(
                    _replaced(self._blocks[layer], partial(_hand_on, self._forms[layer], given, point))
                )
            yield

    @contextmanager
    def _outermost(self) -> Iterator[None]:
        """Refuses runs inside a run: they would lack the blocks that are left out."""
        depth = 0

        def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            nonlocal depth
            depth += 1
            if depth > 1:
                raise NotResumed("an edit runs the model inside its run")

        handle = self.surface.on_run(begin)
        try:
            yield
        finally:
            handle.remove()

    def _called(self, prompts: Prompts) -> Tensor:
        """Runs the model; failures of its own are not caught, but for those of a block that misses another."""
        output = self.surface.call(prompts)
        if not isinstance(output, Tensor) or len(output) != len(prompts):
            raise NotResumed("its output is no tensor with a row for each example")
        return own_memory(self.surface.model, output)

    # ---- The clean pass, and the check of blocks that run alone.

    def _clean(self, prompts: Prompts, leave: Callable[[int, Tensor], Tensor]) -> CleanPass:
        """Runs the model; `leave` gives what a block hands on instead of the stream that it has made."""
        streams: dict[int, Tensor] = {}
        calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

        def left(layer: int, output: Any) -> Any:
            if layer in streams or len(streams) != layer:
                raise NotResumed("its blocks do not run one after the other, once each")
            stream, form = _form_of(output)
            self._forms[layer] = form
            given = leave(layer, stream)
            streams[layer] = given if given is not stream else stream.clone()
            return None if given is stream else form(given)

        handles: list[Handle] = [self.surface.on_run(lambda args, kwargs: calls.append((args, dict(kwargs))))]
        try:
            for layer, block in enumerate(self._blocks):
                handles.append(
                    block.register_forward_hook(
                        lambda module, inputs, output, layer=layer: left(layer, output)
                    )
                )
            output = self._called(prompts)
        finally:
            for handle in handles:
                handle.remove()
        if len(streams) < len(self._blocks) or len(calls) != 1:
            raise NotResumed("its blocks do not run one after the other, once each")
        self._dtype = output.dtype
        return CleanPass(prompts, calls[0], output, streams)

    def _check_perturbed(self, prompts: Prompts) -> None:
        """Compares each block in a run whose streams are perturbed with the block alone, beside other examples."""
        generator = torch.Generator().manual_seed(0)
        made: dict[int, Tensor] = {}
        ends = [KINDS["resid_post"].hook.format(layer) for layer in range(len(self._blocks))]
        ends = [hook for hook in ends if hook in self.surface.hooks and ends_block(self.surface, hook)]

        def noise(like: Tensor) -> Tensor:
            drawn = torch.randn(like.shape, generator=generator).to(like)
            return drawn * like.double().square().mean().sqrt().nan_to_num(nan=1.0).to(like)

        def perturbed(layer: int, stream: Tensor) -> Tensor:
            made[layer] = stream.clone()
            return stream + 0.5 * noise(stream)

        with recording(self.surface, ends) as seen:
            whole = self._clean(prompts, perturbed)
        for hook, left in seen.items():
            self._compare(left, made[blocks_before(hook, self.surface)], prompts, hook)
        twice = prompts.repeated(2)
        for layer in range(max(1, self._first), len(self._blocks) + 1):
            stream = whole.streams[layer - 1]
            both = torch.cat([stream, stream + noise(stream)])
            with self._skipping(range(layer), both, range(layer + 1, len(self._blocks))):
                if layer < len(self._blocks):
                    found, expected = self._made_by(layer, twice), made[layer]
                else:
                    found, expected = self._called(twice), whole.output
            what = "the output" if layer == len(self._blocks) else f"block {layer}"
            if len(found) != len(twice):
                raise NotResumed(f"{what} has no row for each example")
            self._compare(found[: len(prompts)], expected, prompts, what)

    def _made_by(self, layer: int, prompts: Prompts) -> Tensor:
        """Runs the model; returns the stream that one block makes."""
        seen: list[Tensor] = []
        block = self._blocks[layer]
        handle = block.register_forward_hook(lambda module, inputs, output: seen.append(_form_of(output)[0]))
        try:
            self.surface.call(prompts)
        except (RuntimeError, KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise NotResumed(f"block {layer} does not run without those before it: {error}") from error
        finally:
            handle.remove()
        if len(seen) != 1:
            raise NotResumed(f"block {layer} does not run without those before it")
        return seen[0]

    def _compare(self, found: Tensor, expected: Tensor, prompts: Prompts, what: str) -> None:
        """Refuses values at tokens that differ by more than rounding."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise NotResumed(f"{what} has another shape or dtype when blocks run alone")
        if prompts.padded:
            real = prompts.real.to(found.device)
            if found.shape[:2] != real.shape:
                raise NotResumed(f"{what} has no row for each position of the prompts, which are padded")
            found, expected = found[real], expected[real]
        largest = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
        error = float((found - expected).abs().max() / largest)
        # The comparison is negated so that NaN counts as a difference.
        if not error <= ROUNDING.get(found.dtype, 0.0):
            raise NotResumed(f"{what} differs by {error:.1e} when blocks run alone")
        self.rounding = max(self.rounding, error)


def _form_of(output: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Returns the residual stream in what a block returns, and a function that puts another in its place.

    What else there is, such as a pattern, is left out: a model that goes on with it fails the checks.
    """
    if isinstance(output, Tensor):
        return output, _alone
    if type(output) is tuple and output and isinstance(output[0], Tensor):
        return output[0], partial(_in_tuple, len(output))
    raise NotResumed(f"its blocks return {type(output).__name__}")


def _alone(stream: Tensor) -> Tensor:
    return stream


def _in_tuple(length: int, stream: Tensor) -> tuple[Tensor | None, ...]:
    return (stream, *[None] * (length - 1))


def _hand_on(
    form: Callable[[Tensor], Any], stream: Tensor | None, point: nn.Module | None, *args: Any, **kwargs: Any
) -> Any:
    """Stands for a block's forward: returns a stream, that which comes where none is given, as the block would."""
    if stream is None:
        stream = next(
            x for x in chain(args, kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()
        )
    return form(stream if point is None else point(stream))


@contextmanager
def _replaced(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    attributes = vars(block)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = before


def refuse_hooks(model: nn.Module) -> None:
    """Refuses hooks that are not the libraries' own, and a model in the middle of a clean pass."""
    if state_of(model).suspended:
        raise NotResumed("a clean pass is under way")
    everywhere: Iterable[Any] = [
        hook
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
        for hook in getattr(nn.modules.module, name, {}).values()
    ]
    if not all(map(_is_known, everywhere)):
        raise NotResumed("there are hooks on all modules")
    wrapped = vars(model).get("original_model")
    inner = wrapped.named_modules() if isinstance(wrapped, nn.Module) else ()
    for name, module in chain(model.named_modules(), inner):
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(map(_is_known, hooks)):
            raise NotResumed(f"there is a hook on {name or 'the model'}")


def _is_known(hook: Any) -> bool:
    """Tells whether a hook is a library's own, and not a function of the user's inside one of a library's."""
    if isinstance(hook, partial):
        return _is_known(hook.func)
    cells = zip(
        getattr(getattr(hook, "__code__", None), "co_freevars", ()),
        getattr(hook, "__closure__", None) or (),
        strict=False,
    )
    inside = [cell.cell_contents for name, cell in cells if name == "hook"]
    return str(getattr(hook, "__module__", "")).startswith(_KNOWN) and all(map(_is_known, inside))
