"""Carries writes at resid_mid, the input of ln2 on a bridge, on to the residual stream past the MLP."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.bridges.accuracy import COARSEST, PROMISED, RECOMPUTED
from circuits.model.hooks import Function, Handle, Handles


class StreamWrite:
    """Carries a write at resid_mid on to the residual stream. There the hook point is on the MLP's branch, so the
    change is added to the stream at the end of the block.
    """

    def __init__(self, function: Function, module: nn.Module, layer: int) -> None:
        self._function, self._module, self._layer = function, module, layer
        self.change: Tensor | None = None
        self._input: Tensor | None = None
        self._largest = 0.0  # entry of the stream that was replaced

    def put_on(self, block_end: nn.Module) -> Handle:
        writes = _writes.setdefault(self._module, [])
        writes.append(self)
        return Handles(
            self._module.register_forward_pre_hook(lambda module, inputs: self._begin(inputs), prepend=True),
            self._module.register_forward_hook(lambda module, inputs, output: self._write(output)),
            block_end.register_forward_pre_hook(lambda module, inputs: self._carry(inputs)),
            _WriteHandle(writes, self),
        )

    def _begin(self, inputs: tuple[Any, ...]) -> None:
        self._input = inputs[0]

    def _write(self, output: Tensor) -> Tensor | None:
        block_input, self._input = self._input, None
        new = self._function(output)
        if new is not None and block_input is not None:
            refuse_other_writes(block_input, self._module, output, self._layer, before=self)
        self.change = None if new is None else new - output
        self._largest = 0.0 if new is None else float(output.detach().abs().nan_to_num().max())
        return new

    def _carry(self, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Returns the input of the block's end with the change added; refuses one that rounding would blur."""
        # The change is kept until the next write: `through` may be called again with the stream that comes to the end
        # of the block.
        if self.change is None:
            return None
        # The MLP of some models has batch and positions on one axis.
        stream = inputs[0] + self.change.reshape(inputs[0].shape)
        # Digits lost by rounding next to a large old stream do not come back when that is removed. Half precision
        # promises less.
        rounding, least = torch.finfo(stream.dtype).eps * self._largest, float(stream.detach().abs().max())
        if rounding > PROMISED.get(stream.dtype, torch.inf) * least:
            raise CircuitsError(
                f"resid_mid: of a residual stream with entries to {self._largest:.1e} a write that leaves {least:.1e} "
                "has too few digits on a TransformerBridge; run the model in float64, or edit attn_out and resid_pre"
            )
        return (stream, *inputs[1:])


# Active writes by hook point, in the order in which they act.
_writes: WeakKeyDictionary[nn.Module, list[StreamWrite]] = WeakKeyDictionary()


class _WriteHandle:
    def __init__(self, writes: list[StreamWrite], write: StreamWrite) -> None:
        self._writes, self._write = writes, write

    def remove(self) -> None:
        if self._write in self._writes:
            self._writes.remove(self._write)


def refuse_other_writes(
    block_input: Tensor, module: nn.Module, output: Tensor, layer: int, before: StreamWrite | None = None
) -> None:
    """Refuses hooks of the user's at resid_mid: the MLP reads their output, but the residual stream does not carry it
    on.

    Args:
        module: the hook point, whose own writes are known.
        before: of these, only those that act before this one have acted.
    """
    writes = _writes.get(module, [])
    writes = writes if before is None else writes[: writes.index(before)]
    with torch.no_grad():
        expected = sum((write.change for write in writes if write.change is not None), block_input)
        difference = (expected - output).abs().masked_fill(expected == output, 0).max()
        # The comparison is negated so that NaN counts as a difference.
        if not bool(difference <= RECOMPUTED.get(block_input.dtype, COARSEST) * output.abs().max()):
            raise CircuitsError(
                f"resid_mid.{layer}: a hook of yours changes it, which on a TransformerBridge reaches the MLP and not "
                "the residual stream, so the two differ; make that change with edit"
            )
