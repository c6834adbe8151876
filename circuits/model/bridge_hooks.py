"""Reads and writes the activations of a `TransformerBridge` (transformer-lens 3.9 to 4.3).

There a hook point is not always in line. Heads are hooked flat, and split here. A write at `resid_mid` (the input of
ln2) would not reach the skip connection, so it is made in place. Scores and pattern are met at the softmax where the
module computes attention itself.

Hooks here and beside are lambdas: a deep copy of a model shares them, and does not copy the objects that they refer to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.edit_state import list_modules
from circuits.model.hooks import (
    Function,
    Handle,
    Handles,
    bind_arguments,
    hook_module_input,
    hook_module_output,
    run_hooked_module,
)
from circuits.model.prompts_with_mask import Prompts
from circuits.model.sites import KINDS
from circuits.model.softmax_hooks import SoftmaxHooks
from circuits.model.supported_models import AT_SOFTMAX, ModelFamily, find_model_family

BRIDGE = "TransformerBridge"

# Sites at which the model has all heads on one flat axis.
_BY_HEAD = ("q", "k", "v", "z")
# Sites inside the MLP and around it.
_IN_MLP = ("resid_mid", "mlp_pre", "mlp_post", "mlp_out")


class BridgeHooks(ABC):
    """Hooks one bridge at the sites of `KINDS`."""

    def __init__(self, model: nn.Module, hooks: Mapping[str, nn.Module], wrapped: nn.Module) -> None:
        self.wrapped = wrapped
        self._hooks = hooks
        self._blocks = list(model.get_submodule("blocks").children())
        cfg: Any = model.cfg
        self._d_head: int = cfg.d_head
        self._sites = {
            kind.hook.format(layer): (kind.name, layer)
            for kind in KINDS.values()
            if kind.per_layer
            for layer in range(len(self._blocks))
        }

    @abstractmethod
    def block_module(self, layer: int) -> Any:
        """Returns the module whose attributes ln1, ln2 and mlp are the parts of a block, with their hook points."""

    def _hook_at_softmax(self, site: str, layer: int, function: Function) -> Handle | None:
        """Hooks a site that is met at the softmax; returns None where its hook point is in line."""
        return None

    def on_forward(self, hook: str, function: Function) -> Handle:
        module, given = self._hooks[hook], self._adapt_hook_function(hook, function)
        site, layer = self._sites.get(hook, (hook, None))
        if layer is None:
            return hook_module_output(module, given)
        if site == "resid_mid" and self.feeds_only_mlp(site):
            return _hook_mlp_stream_in_place(module, given, layer)
        return self._hook_at_softmax(site, layer, given) or hook_module_output(module, given)

    def on_input(self, hook: str, function: Function) -> Handle:
        return hook_module_input(self._hooks[hook], self._adapt_hook_function(hook, function))

    def _adapt_hook_function(self, hook: str, function: Function) -> Function:
        """Gives a function the activation in the shape of its site, and of runs that use its layer alone."""
        _, layer = self._sites.get(hook, (hook, None))

        def apply_in_site_shape(x: Tensor) -> Tensor | None:
            if not self._is_layer_used(layer):
                return None
            new = function(shown := self._to_site_shape(hook, x))
            return new if new is None or shown is x else new.reshape(x.shape)

        return apply_in_site_shape

    def _to_site_shape(self, hook: str, x: Tensor) -> Tensor:
        """Returns what a hook point has, in the shape of its site."""
        site, layer = self._sites.get(hook, (hook, None))
        # With `use_split_qkv_input` the heads are apart already.
        by_head = layer is not None and site in _BY_HEAD and x.ndim == 3
        return x.unflatten(-1, (-1, self._d_head)) if by_head else x

    def _to_hook_shape(self, hook: str, x: Tensor) -> Tensor:
        """Returns an activation in the shape that its hook point has."""
        site, layer = self._sites.get(hook, (hook, None))
        return x.flatten(-2) if layer is not None and site in _BY_HEAD else x

    def apply_hooks(self, hook: str, activation: Tensor) -> Tensor:
        site, layer = self._sites.get(hook, (hook, None))
        if layer is not None and site == "resid_mid" and self.feeds_only_mlp(site):
            output: Tensor = self._hooks[hook](copy := activation.clone())
            _check_resid_mid_unhooked(output, copy, layer)
            written = output.is_inference() or output._version > 0
            return output if written or not torch.equal(output, activation) else activation
        flat = self._to_hook_shape(hook, activation)
        output = run_hooked_module(self._hooks[hook], flat)
        return activation if output is flat else output.reshape(activation.shape)

    def feeds_only_mlp(self, site: str) -> bool:
        """Tells whether a hook point of the residual stream feeds only the MLP."""
        return site == "resid_mid"

    def to_bridge_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Converts the wrapped model's arguments into those of the bridge: the inputs, and all arguments by name."""
        given = bind_arguments(type(self.wrapped).forward, args, kwargs)
        return (given.get("input_ids", args[0] if args else None),), given

    def _is_layer_used(self, layer: int | None) -> bool:
        """Tells whether the run uses a layer. With `start_at_layer=` (4.x) the bridge computes what comes before that
        layer, and throws it away.
        """
        start = getattr(self._blocks[0], "_start_at_layer_idx", None)
        return start is None or (layer is not None and layer >= start)


class NativeBridgeHooks(BridgeHooks):
    """Hooks one native bridge (boot_native)."""

    def block_module(self, layer: int) -> Any:
        return _wrapped_module(self._blocks[layer])

    def _hook_at_softmax(self, site: str, layer: int, function: Function) -> Handle | None:
        attention = _wrapped_module(_wrapped_module(self._blocks[layer]).attn)
        in_line = bool(getattr(attention, "accepts_pattern_fn", False))
        if site == "scores" or (site == "pattern" and not in_line):
            return SoftmaxHooks.of(attention, layer, masks_after=True).listen(site, function)
        return None


class HuggingFaceBridgeHooks(BridgeHooks):
    """Hooks one bridge around a Hugging Face model."""

    def __init__(
        self, model: nn.Module, hooks: dict[str, nn.Module], wrapped: nn.Module, family: ModelFamily
    ) -> None:
        super().__init__(model, hooks, wrapped)
        self._model = model
        # In compatibility mode such a query has a pattern of zeros.
        self._compatible = bool(getattr(model, "compatibility_mode", False))
        self.family = family
        # The length of the run, by layer, where the MLP does not show it.
        self._lengths: dict[int, int] = {}
        for kind in KINDS.values():
            for layer in range(len(self._blocks) if kind.per_layer else 1):
                hook = kind.hook.format(layer)
                if kind.name not in family.sites:
                    hooks.pop(hook, None)
                elif kind.name in family.places:
                    hooks[hook] = hooks[family.places[kind.name].format(layer)]

    def block_module(self, layer: int) -> Any:
        return self._blocks[layer]

    def _hook_at_softmax(self, site: str, layer: int, function: Function) -> Handle | None:
        if not self.family.softmax or site not in AT_SOFTMAX:
            return None
        attention: Any = self._blocks[layer].get_submodule("attn").original_component
        return SoftmaxHooks.of(attention, layer).listen(site, function)

    def feeds_only_mlp(self, site: str) -> bool:
        return site == "resid_mid" and site not in self.family.places

    def on_forward(self, hook: str, function: Function) -> Handle:
        return self._record_run_lengths(hook, super().on_forward(hook, function))

    def on_input(self, hook: str, function: Function) -> Handle:
        return self._record_run_lengths(hook, super().on_input(hook, function))

    def _to_site_shape(self, hook: str, x: Tensor) -> Tensor:
        layer = self._flattened_mlp_layer(hook)
        if layer is None:
            return super()._to_site_shape(hook, x)
        return x.unflatten(0, (-1, self._lengths[layer]))

    def _to_hook_shape(self, hook: str, x: Tensor) -> Tensor:
        return super()._to_hook_shape(hook, x) if self._flattened_mlp_layer(hook) is None else x.flatten(0, 1)

    @contextmanager
    def empty_queries_unmasked(self) -> Iterator[None]:
        """Lets queries that see no key, which are padding, see all of them, where they would make the run NaN.

        In float64 the wrapped model masks with the lowest number of that type, and many take the softmax in float32,
        where it is minus infinity: a query without a key then gets NaN, which every later layer spreads to the tokens.
        """
        if self._compatible:
            yield
            return
        with ExitStack() as stack:
            for block in self._blocks:
                attention = block.get_submodule("attn")
                handle = attention.register_forward_pre_hook(_unmask_empty_queries, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def check_equal_lengths_for_rotary(self, prompts: Prompts, what: str) -> None:
        """Refuses prompts of unequal length where a row gets the rotary angles of the longest in the batch."""
        if self._length_dependent_rope_type and (prompts.padded or "position_ids" in prompts.extra):
            raise CircuitsError(
                f"{what}: with {self._length_dependent_rope_type} rotary scaling a prompt gets other angles beside a "
                "longer one than alone; run prompts of each length apart"
            )

    @cached_property
    def _length_dependent_rope_type(self) -> str | None:
        """The rotary scaling whose angles depend on the longest row of a run."""
        config: Any = self.wrapped.config
        scaling = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
        return next((kind for kind in ("dynamic", "longrope") if kind in scaling), None)

    def reset_rotary_cache(self) -> None:
        """Makes the next run compute its rotary angles anew; with dynamic scaling they would be an earlier, longer
        run's.
        """
        for module in list_modules(self._model) if self._length_dependent_rope_type else ():
            for name in [each for each in vars(module) if each.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)

    def _flattened_mlp_layer(self, hook: str) -> int | None:
        """Returns the layer of a hook point that has batch and positions on one axis."""
        site, layer = self._sites.get(hook, (hook, None))
        return layer if self.family.flat_mlp and site in _IN_MLP else None

    def _record_run_lengths(self, hook: str, handle: Handle) -> Handle:
        """Notes the length of each run, where a hook point that is hooked has batch and positions on one axis."""
        layer, lengths = self._flattened_mlp_layer(hook), self._lengths
        if layer is None:
            return handle
        start = self._hooks[KINDS["resid_pre"].hook.format(layer)]
        count = start.register_forward_hook(
            lambda module, inputs, output: lengths.update({layer: output.shape[1]})
        )
        return Handles(count, handle)


def make_bridge_hooks(model: nn.Module, hooks: dict[str, nn.Module], parallel: bool) -> BridgeHooks:
    """Returns the hooks of a bridge; hook points of sites that are not supported are removed from `hooks`."""
    wrapped: Any = model.__dict__["original_model"]
    if type(wrapped).__name__ == "NativeModel":  # TransformerLens' own
        return NativeBridgeHooks(model, hooks, wrapped)
    return HuggingFaceBridgeHooks(model, hooks, wrapped, find_model_family(model, wrapped, parallel))


def _wrapped_module(component: Any) -> Any:
    """Returns the wrapped module of a bridge component."""
    return component.get_submodule("_original_component")


def _unmask_empty_queries(
    module: nn.Module, args: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Clears the rows of an additive mask [batch 1 query key] in float64 that hide every key."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.dtype != torch.float64:
        return None
    empty = (mask <= torch.finfo(mask.dtype).min).all(-1, keepdim=True)
    return args, {**kwargs, "attention_mask": mask.masked_fill(empty, 0.0)}


def _hook_mlp_stream_in_place(module: nn.Module, function: Function, layer: int) -> Handle:
    """Hooks a hook point of the residual stream that feeds the MLP alone: what is written there is written to the
    stream's own memory, which the skip connection reads next.
    """
    streams: list[Tensor] = []

    def write_in_place(output: Tensor) -> Tensor | None:
        stream = streams.pop()
        # A copy, as gradients may need what the function was given.
        new = function(output.clone())
        if new is None:
            return None
        _check_resid_mid_unhooked(output, stream, layer)
        return output.copy_(new)

    return Handles(
        module.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0]), prepend=True),
        module.register_forward_hook(lambda module, inputs, output: write_in_place(output)),
    )


def _check_resid_mid_unhooked(output: Tensor, stream: Tensor, layer: int) -> None:
    """Refuses hooks of the user's at resid_mid: the MLP reads their output, but the stream does not carry it on."""
    if output is not stream:
        raise CircuitsError(
            f"resid_mid.{layer}: a hook of yours changes it, which on a TransformerBridge reaches the MLP and not the "
            "residual stream, so the two differ; make that change with edit"
        )
