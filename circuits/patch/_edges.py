"""Screens edges: gradient estimates of the effect of patching every direct path, and exact effects of the largest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.base import Replacement
from circuits.interventions.edits import Edit
from circuits.interventions.paths import Path
from circuits.interventions.replacements import DIRECTION
from circuits.model.blocks import model_block
from circuits.model.sites import Site
from circuits.model.state import assert_weights_unchanged
from circuits.patch._edge_estimates import estimated
from circuits.patch._endpoints import Endpoint, inputs_of, senders_of
from circuits.patch._gradients import Pair, ready_for_gradients
from circuits.patch._ranking import Candidate, Counts, ranked, read_steps, refuse_inside_blocks
from circuits.patch._result import ScreenResult
from circuits.patch._screen import LINES, METHODS
from circuits.sweeps.measurements import Row
from circuits.sweeps.metrics import PerExample
from circuits.validate import read_choice

CALLER = "patch.edges"

#: The sites of the residual stream itself.
STREAMS = ("resid_pre", "resid_mid", "resid_post")


def edges(
    model: Any,
    base: Any,
    source: Any,
    metric: Any = None,
    *,
    batch: Any = None,
    how: str = "resample",
    method: str = "integrated",
    steps: int = 5,
    line: str = "input",
    exact: int | str = 10,
    rank: str = "mean",
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> ScreenResult:
    """Estimates the effect of `patch.path` from `source` along every edge, and measures the largest exactly.

    An edge leads from a sender (embed, a head, an MLP) to a receiver computed after it (a head's q, k or v, the
    pre-activations of an MLP, the output), past everything between. The estimate is the change, source − base, of the
    sender's output to the residual stream, times ∂metric/∂(the residual stream as read by this receiver only),
    summed over positions (edge attribution patching: Syed et al. 2023, arXiv:2310.10348). Where a norm stands between a
    head and the stream, the change is what the norm makes of it to first order, in the run of the gradient.

    Args:
        method: "gradient", the gradient at base: the derivative of the metric along `patch.path`. "integrated", the
            mean of the gradients at `steps` midpoints from base to source.
        line: what moves under "integrated". "input", the network's embeddings (Hanna et al. 2024, arXiv:2403.17806):
            `steps` passes in all. "site", the sender's site (a layer's heads, an MLP, embed) as a whole, all before it
            as at base: `steps` passes per site.
        base: as in `patch.screen`.
        source: as in `patch.screen`; for how="mean" any batch, for "zero" None.
        how: what an edge carries, as in `circuit.keep`: "resample", what the sender has on the source; "mean", the mean
            of that over the source's examples, per position; "zero", nothing. "Source" above is then a run in which
            every sender has that value.
        metric: as in `patch.screen`.
        batch: as in `patch.screen`.
        exact: as in `patch.screen`.
        rank: as in `patch.screen`.
        batch_size: as in `patch.screen`.
        seed: as in `patch.screen`.
        draws: as in `patch.screen`.
        flips: as in `patch.screen`.

    Heads that share keys and values are one receiver at k and v, their key-value group. In parallel blocks the MLP
    does not hear the heads of its layer. Position embeddings (pos_embed) are a sender under "zero"; on a source, and in
    the mean over sources, they are what they are on base. Refused inside a block of `intervene` that edits the model.
    """
    pair = Pair.read(CALLER, model, base, source, metric, batch, how, batch_size=batch_size, of_edges=True)
    read_choice(method, METHODS, CALLER, "method")
    read_choice(line, LINES, CALLER, "line")
    steps, counts = read_steps(steps, CALLER), Counts.read(CALLER, exact, seed, draws, flips, rank)
    senders, receivers = senders_of(pair.surface, how), inputs_of(pair.surface)
    refuse_inside_blocks(pair)

    def estimates(size: int) -> tuple[Pair, list[PerExample], list[Candidate]]:
        sized = pair.of_size(size)
        return sized, *_candidates(sized, senders, receivers, steps if method == "integrated" else None, line)

    sized, baseline, candidates = within_memory(pair.batch_size, estimates)
    settings: Row = {"method": method, "how": how}
    settings |= {"direction": DIRECTION} if how == "resample" else {}
    settings |= {"steps": steps, "line": line} if method == "integrated" else {}
    return ranked(sized, candidates, baseline, counts, settings)


def _candidates(
    pair: Pair, senders: list[Endpoint], receivers: list[Endpoint], steps: int | None, line: str
) -> tuple[list[PerExample], list[Candidate]]:
    """Returns the metrics at base, batch by batch, and every edge with its estimates."""
    baseline: list[PerExample] = []
    candidates: dict[tuple[str, str], Candidate] = {}
    for piece in pair.batches():
        with ready_for_gradients(pair.surface), assert_weights_unchanged(pair.surface.model, CALLER):
            _refuse_edited_streams(piece)
            values, estimates = estimated(piece, senders, receivers, steps, line)
        baseline.append(values)
        # Senders are in order of computation; `shifts` ends before the receiver, so zip stops there.
        for receiver in receivers:
            for name, shifts in estimates[receiver.name].items():
                for sender, shift in zip(senders, shifts, strict=False):
                    edge = sender.name, receiver.name
                    if edge not in candidates:
                        candidates[edge] = Candidate(
                            _description(*edge, pair.how), partial(_path, sender, receiver, pair.replacement)
                        )
                    candidates[edge].add(name, shift.cpu().numpy())
    return baseline, list(candidates.values())


def _refuse_edited_streams(piece: Pair) -> None:
    """Refuses user hooks that change the residual stream itself, because estimates would ignore them.

    Hooks on the outputs of components count as part of the components.
    """
    surface = piece.surface
    blocks = [surface.model.get_submodule(f"blocks.{layer}") for layer in range(surface.n_layers)]
    names = [Site(name, layer).hook() for layer in range(surface.n_layers) for name in STREAMS]
    names = [hook for hook in names if hook in surface.hooks]
    if not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in (*blocks, *(surface.hooks[hook] for hook in names))
    ):
        return
    stream_in: dict[str, Tensor] = {}
    last_out: list[Tensor] = []

    def arrive(hook: str, x: Tensor) -> None:
        stream_in[hook] = x.clone()
        if hook.endswith("resid_pre") and last_out and not surface.post_norm:
            refuse(hook, x, last_out.pop())

    def leave(hook: str, x: Tensor) -> None:
        refuse(hook, x, stream_in.pop(hook))
        last_out[:] = [x.clone()] if hook.endswith("resid_post") else []

    def refuse(hook: str, x: Tensor, expected: Tensor) -> None:
        if not torch.equal(x, expected):
            raise CircuitsError(
                f"{CALLER}: a hook changes the residual stream at {hook}, past which estimates would carry what "
                "senders change as it is, and patch.path would not; take it off"
            )

    @model_block
    def looking() -> Iterator[None]:
        with ExitStack() as stack:
            for hook in names:
                stack.callback(surface.before(hook, partial(arrive, hook)).remove)
                stack.callback(surface.on_forward(hook, partial(leave, hook)).remove)
            yield

    with torch.no_grad(), looking():
        surface.call(piece.base)


def _description(sender: str, receiver: str, how: str) -> Row:
    return {
        "variant": f"{sender} -> {receiver}",
        "intervention": f"patch.path ({DIRECTION if how == 'resample' else how})",
        "sender": sender,
        "receiver": receiver,
    }


def _path(sender: Endpoint, receiver: Endpoint, replacement: Replacement) -> Path:
    """Returns the `patch.path` along one edge."""
    receivers = (None if receiver.name == "output" else receiver.place,)
    return Path(Edit("patch.path", (sender.place,), replacement), receivers, None)
