"""Reads and writes the same sites on a small bridge, and, by hooks of torch alone, on the Hugging Face model that it is
around a copy of.

`qualification` compares the two: what holds the same and does the same in both is what the model computes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from circuits.model.bridges.families import Family
from circuits.model.bridges.huggingface import HuggingFaceBridge
from circuits.model.hooks import Function
from circuits.model.sites import KINDS


class BridgeSites:
    """The small bridge, hooked as `circuits` hooks one at the sites of a row."""

    def __init__(self, bridge: Any, row: Family, read_out: Callable[[Tensor], Tensor] = torch.clone) -> None:
        self._bridge, self._read_out = bridge, read_out
        self._hooks = {name: hook for name, hook in bridge.hook_dict.items() if isinstance(hook, nn.Module)}
        self._hooked = HuggingFaceBridge(bridge, self._hooks, bridge.original_model, row)

    def run(
        self, tokens: Tensor, site: str | None = None, layer: int | None = None, noise: Tensor | None = None
    ) -> Tensor:
        with torch.no_grad(), ExitStack() as stack:
            if site is not None:
                hook = KINDS[site].hook.format(layer)
                stack.callback(self._hooked.on_forward(hook, _shift(noise)).remove)
            return self._read_out(self._bridge(tokens))

    def read(
        self,
        tokens: Tensor,
        places: list[tuple[str, int | None]],
        write: tuple[str, int | None, Tensor] | None = None,
    ) -> dict[tuple[str, int | None], Tensor]:
        """Returns the activations that the hooks see in one run, with noise written at one of them if asked."""
        seen: dict[tuple[str, int | None], Tensor] = {}
        with torch.no_grad(), ExitStack() as stack:
            if write is not None:
                site, layer, noise = write
                hook = KINDS[site].hook.format(layer)
                stack.callback(self._hooked.on_forward(hook, _shift(noise)).remove)
            for place in places:
                hook = KINDS[place[0]].hook.format(place[1])
                if hook in self._hooks:
                    stack.callback(self._hooked.on_forward(hook, _keep(seen, place)).remove)
            self._bridge(tokens)
        return {place: x for place, x in seen.items() if x.ndim == len(KINDS[place[0]].axes)}


def _shift(by: Tensor | None) -> Function:
    return lambda x: x if by is None else x + by


def _keep(seen: dict[Any, Tensor], key: Any) -> Function:
    def keep(x: Tensor) -> None:
        seen[key] = x.clone()

    return keep


class HuggingFaceSites:
    """The small Hugging Face model, hooked by torch at its own modules, which the bridge's names lead to."""

    def __init__(
        self,
        plain: nn.Module,
        bridge: Any,
        places: Mapping[str, str] = MappingProxyType({}),
        read_out: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        """
        Args:
            places: hook points by site, as in `Family`.
        """
        self._plain, self._bridge = plain, bridge
        self._places, self._read_out = places, read_out
        config: Any = plain.config
        self._heads = config.num_attention_heads
        self._blocks = list(bridge.blocks)

    def run(
        self, tokens: Tensor, site: str | None = None, layer: int | None = None, noise: Tensor | None = None
    ) -> Tensor:
        with torch.no_grad(), ExitStack() as stack:
            if site is not None:
                stack.enter_context(self._at(site, layer, _by_example(_shift(noise), len(tokens))))
            return self._read_out(self._plain(tokens, use_cache=False).logits)

    def read(
        self, tokens: Tensor, places: list[tuple[str, int | None]]
    ) -> dict[tuple[str, int | None], Tensor]:
        seen: dict[tuple[str, int | None], Tensor] = {}
        for place in places:
            try:
                with torch.no_grad(), self._at(*place, _by_example(_keep(seen, place), len(tokens))):
                    self._plain(tokens, use_cache=False)
            except (AttributeError, LookupError, RuntimeError):
                continue  # The model has no such module, or one of another form.
        return seen

    @contextmanager
    def _at(self, site: str, layer: int | None, function: Function) -> Iterator[None]:
        if site in ("scores", "pattern"):
            assert layer is not None
            with _Softmax(layer, function, before=site == "scores"):
                yield
            return
        handle = self._hook(site, layer, function)
        try:
            yield
        finally:
            handle.remove()

    def _hook(self, site: str, layer: int | None, function: Function) -> Any:
        """Puts a function onto the wrapped model's own modules where a site is computed, and returns its handle."""
        if layer is None:
            return _on_output(self._module(getattr(self._bridge, site)), function)
        block = self._blocks[layer]
        here = self._module(block, layer)

        def part(*names: str) -> nn.Module:
            component: Any = block
            module = here
            for name in names:
                component = getattr(component, name)
                module = module.get_submodule(component.name) if component.name else module
            return module

        if site in self._places:
            *names, point = self._places[site].split(".")[2:]
            return (_on_input if point == "hook_in" else _on_output)(part(*names), function)
        if site == "resid_pre":
            return _on_input(here, function)
        if site == "resid_post":
            return _on_output(here, function)
        if site in ("q", "k", "v"):
            return self._on_projection(site, block, part, function)
        if site == "z":
            return _on_input(part("attn", "o"), _by_head(function, self._heads))
        if site == "mlp_pre":
            return _on_output(part("mlp", "gate" if hasattr(block.mlp, "gate") else "in"), function)
        if site == "mlp_post":
            return _on_input(part("mlp", "out"), function)
        attention = site in ("attn_out", "resid_mid")
        norm = "ln1_post" if attention else "ln2_post"
        # An MLP that is not a module of its own (OPT, BERT) ends with its last matrix.
        own = ["attn"] if attention else ["mlp", "out"] if hasattr(block.mlp, "out") else ["mlp"]
        adds = part(norm) if hasattr(block, norm) else part(*own)
        if site == "resid_mid":
            return _Middle(here, adds, function)
        return _on_output(adds, function)

    def _on_projection(
        self, site: str, block: Any, part: Callable[..., nn.Module], function: Function
    ) -> Any:
        """Puts a function onto q, k or v of the wrapped model, where one matrix may make all three."""
        heads = self._heads if site == "q" else _groups(self._plain, self._heads)
        if not hasattr(block.attn, "qkv"):
            return _on_output(part("attn", site), _by_head(function, heads))
        index = "qkv".index(site)
        own = getattr(block.attn, site)
        joint: Any = part("attn", "qkv")
        weight: Tensor = own.weight
        whole: Tensor = joint.weight if joint.weight.shape[-1] == weight.shape[-1] else joint.weight.mT

        def changed(x: Tensor) -> Tensor | None:
            if torch.equal(whole.unflatten(0, (3, -1))[index], weight):
                pieces, axis = x.unflatten(-1, (3, heads, -1)), -3
            else:  # q, k and v of each head side by side
                pieces, axis = x.unflatten(-1, (heads, 3, -1)), -2
            new = function(pieces.select(axis, index))
            if new is None:
                return None
            pieces = pieces.clone()
            pieces.select(axis, index).copy_(new)
            return pieces.flatten(-3)

        return _on_output(joint, changed)

    def _module(self, component: Any, layer: int | None = None) -> nn.Module:
        path = component.name
        if layer is not None and not path.endswith(f".{layer}"):
            path = f"{path}.{layer}"
        return self._plain.get_submodule(path)


def _groups(plain: nn.Module, heads: int) -> int:
    config: Any = plain.config
    return int(getattr(config, "num_key_value_heads", None) or heads)


def _by_head(function: Function, heads: int) -> Function:
    def apply(x: Tensor) -> Tensor | None:
        new = function(x.unflatten(-1, (heads, -1)))
        return None if new is None else new.flatten(-2)

    return apply


def _by_example(function: Function, batch: int) -> Function:
    """Gives a function [batch pos ...] of a module that has batch and positions on one axis."""

    def apply(x: Tensor) -> Tensor | None:
        if x.ndim > 2:
            return function(x)
        new = function(x.unflatten(0, (batch, -1)))
        return None if new is None else new.flatten(0, 1)

    return apply


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _on_output(module: nn.Module, function: Function) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        new = function(_first(output))
        if new is None:
            return None
        return (new, *output[1:]) if isinstance(output, tuple) else new

    return module.register_forward_hook(hook)


def _on_input(module: nn.Module, function: Function) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if inputs:
            new = function(inputs[0])
            return None if new is None else ((new, *inputs[1:]), given)
        new = function(given["hidden_states"])
        return None if new is None else (inputs, {**given, "hidden_states": new})

    return module.register_forward_pre_hook(hook, with_kwargs=True)


class _Middle:
    """Writes the sum of a block's input and what its attention adds, by what attention adds."""

    def __init__(self, block: nn.Module, adds: nn.Module, function: Function) -> None:
        self._stream: Tensor | None = None
        self._handles = (_on_input(block, self._note), _on_output(adds, self._change))
        self._function = function

    def _note(self, stream: Tensor) -> None:
        self._stream = stream

    def _change(self, added: Tensor) -> Tensor | None:
        assert self._stream is not None
        new = self._function(self._stream + added)
        return None if new is None else new - self._stream

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Softmax(TorchFunctionMode):
    """Changes what the softmax of one layer's attention is given, or what it gives."""

    def __init__(self, layer: int, function: Function, before: bool) -> None:
        super().__init__()
        self._layer, self._function, self._before = layer, function, before
        self._seen = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets the function see, and change, what goes into or comes out of one layer's softmax."""
        kwargs = kwargs or {}
        # Inside this method the mode is off, so that a softmax which calls another is seen once.
        if getattr(func, "__name__", "") != "softmax" or not args or args[0].ndim != 4:
            return func(*args, **kwargs)
        self._seen += 1
        if self._seen != self._layer + 1:
            return func(*args, **kwargs)
        if self._before:
            new = self._function(args[0])
            return func(args[0] if new is None else new, *args[1:], **kwargs)
        output = func(*args, **kwargs)
        new = self._function(output.double())
        return output if new is None else new.to(output.dtype)
