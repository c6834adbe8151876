"""The one engine that carries out interventions: plan against the model, run clean passes, hook, undo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions import Firing, Intervention, Write
from circuits.references import References
from circuits.sites import closest_sites
from circuits.state import State, state_of
from circuits.surface import Surface


def planned(interventions: Iterable[Any], surface: Surface) -> tuple[Write, ...]:
    """All writes of all interventions, in argument order; every fault that shows without a run is raised
    here.
    """
    writes: list[Write] = []
    for intervention in interventions:
        if not isinstance(intervention, Intervention):
            raise CircuitsError(
                f"not an intervention: {intervention!r} ({type(intervention).__name__}); "
                "make one with ablate, patch or edit"
            )
        writes += intervention.plan(surface)
    return tuple(writes)


@contextmanager
def intervene(model: Any, *interventions: Intervention) -> Iterator[Any]:
    """Run the model with some edits, for the length of a block.

        with intervene(model, ablate.uniform("all"), ablate.zero("mlp_out.1")):
            output = model(tokens)

    Interventions apply in argument order, a later one seeing what an earlier one left, and what hooks of
    the user's that were there before left; blocks may be nested, and an inner block adds to the outer one.
    Clean passes that an intervention needs (`reference=`, `source=`) are run on entry, on the model as it
    was before our outermost block, in eval mode and without gradients. Modes and gradients of the block
    itself are left alone. On any exit only what was added here is removed.

    Raises `CircuitsError` on entry if an intervention does not fit the model, and on a normal exit if one
    of them never took effect because its hook did not fire.
    """
    surface = Surface.of(model)
    writes = planned(interventions, surface)
    references = References(surface)
    references.fetch(writes)
    with attached(surface, writes, references):
        yield model


@contextmanager
def attached(surface: Surface, writes: tuple[Write, ...], references: References) -> Iterator[None]:
    """Hook planned writes onto the model. Their clean passes must have been fetched."""
    state = state_of(surface.model)
    fired = [0] * len(writes)
    runs = [0]
    with ExitStack() as stack:
        stack.callback(surface.on_run(_counter(runs, state)).remove)
        reads: list[dict[str, Tensor]] = [{} for _ in writes]
        for index, write in enumerate(writes):
            hook_function = _writer(write, references.of(write), reads[index], state, fired, index)
            stack.callback(surface.on_forward(write.hook, hook_function).remove)
        # Readers come last, so that they see what all of these writes leave.
        for write, found in zip(writes, reads, strict=True):
            for name, hook in write.replacement.reads(write).items():
                stack.callback(surface.on_forward(hook, _reader(found, name, state)).remove)
        yield
    # Only reached when the body raised nothing, and with every hook already off.
    for write, count in zip(writes, fired, strict=True):
        if count == 0:
            raise CircuitsError(_silent(write, runs[0]))


def _silent(write: Write, runs: int) -> str:
    if runs == 0:
        return f"{write.label}: the model was not run inside the block"
    return (
        f"{write.label}: {write.hook} never fired in {runs} run(s), so nothing was edited; this model has it "
        f"switched off; closest sites: {', '.join(closest_sites(write.hook))}"
    )


def _counter(runs: list[int], state: State) -> Callable[[], None]:
    def count() -> None:
        if not state.suspended:
            runs[0] += 1

    return count


def _reader(reads: dict[str, Tensor], name: str, state: State) -> Callable[[Tensor], None]:
    def read(activation: Tensor) -> None:
        if not state.suspended:
            reads[name] = activation.detach()

    return read


def _writer(
    write: Write,
    reference: Tensor | None,
    reads: dict[str, Tensor],
    state: State,
    fired: list[int],
    index: int,
) -> Callable[[Tensor], Tensor | None]:
    def replace(current: Tensor) -> Tensor | None:
        if state.suspended:
            return None
        selected = write.selected(current, state.rows, state.total)
        firing = Firing(write, selected, reference, reads, state.rows, state.total)
        new = write.replacement.value(current, firing)
        fired[index] += 1
        return torch.where(selected, new, current)

    return replace
