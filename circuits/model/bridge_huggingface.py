"""Reads and writes the activations of a `TransformerBridge` around a Hugging Face model (boot_transformers).

Its hook points are in line, but for the sites that the table in `supported` leaves out or finds elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.blocks import model_block
from circuits.model.bridge import Bridge, Inputs, SoftmaxHooks
from circuits.model.hooks import Function, Handle, Handles
from circuits.model.sites import KINDS
from circuits.model.state import modules_of
from circuits.model.supported import AT_SOFTMAX, Family

# Sites inside the MLP and around it.
_IN_MLP = ("resid_mid", "mlp_pre", "mlp_post", "mlp_out")


class HuggingFaceBridge(Bridge):
    """Hooks one bridge around a Hugging Face model."""

    def __init__(
        self, model: nn.Module, hooks: dict[str, nn.Module], wrapped: nn.Module, family: Family
    ) -> None:
        """
        Args:
            hooks: the hook points by name; those of sites that are not supported are removed from it.
        """
        super().__init__(model, hooks, wrapped)
        self._model = model
        self._cfg: Any = model.cfg
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

    @property
    def key_heads(self) -> int:
        return int(getattr(self._cfg, "n_key_value_heads", None) or self._cfg.n_heads)

    def block(self, layer: int) -> Any:
        return self._blocks[layer]

    def _d_head(self, layer: int) -> int:
        return int(self._cfg.d_head)

    def _at_softmax(self, site: str, layer: int, function: Function) -> Handle | None:
        if not self.family.softmax or site not in AT_SOFTMAX:
            return None
        attention: Any = self._blocks[layer].get_submodule("attn").original_component
        return SoftmaxHooks.of(attention, layer).listen(site, function)

    def on_branch(self, site: str) -> bool:
        return site == "resid_mid" and site not in self.family.places

    def on_forward(self, hook: str, function: Function) -> Handle:
        layer = self._flat_at(hook)
        if layer is None:
            return super().on_forward(hook, function)
        return Handles(self._count(layer), super().on_forward(hook, self._by_example(layer, function)))

    def before(self, hook: str, function: Function) -> Handle:
        layer = self._flat_at(hook)
        if layer is None:
            return super().before(hook, function)
        return Handles(self._count(layer), super().before(hook, self._by_example(layer, function)))

    def through(self, hook: str, activation: Tensor) -> Tensor:
        if self._flat_at(hook) is None:
            return super().through(hook, activation)
        flat = activation.flatten(0, 1)
        output = super().through(hook, flat)
        return activation if output is flat else output.unflatten(0, activation.shape[:2])

    @model_block
    def without_empty_queries(self) -> Iterator[None]:
        """Lets queries that see no key, which are padding, see all of them, where they would make the run NaN.

        In float64 the wrapped model masks with the lowest number of that type, and many take the softmax in float32,
        where it is minus infinity: a query without a key then gets NaN, which every later layer spreads to the tokens.
        """
        if self._compatible:
            yield
            return
        with ExitStack() as stack:
            for block in self._blocks:
                handle = block.get_submodule("attn").register_forward_pre_hook(_seeing, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def check_angles(self, prompts: Inputs, what: str) -> None:
        """Refuses rows that would get other rotary angles than each gets alone: those of the longest in the batch."""
        places, lengths = prompts.extra.get("position_ids"), prompts.lengths
        longest = lengths.max()
        if places is not None:
            lengths, longest = places.masked_fill(~prompts.real, 0).amax(1) + 1, places.max() + 1
        for kind, limit in self._rotations:
            own, given = (
                n.clamp(min=limit, max=limit + 1 if kind == "longrope" else None) for n in (lengths, longest)
            )
            if bool((own != given).any()):
                raise CircuitsError(
                    f"{what}: with {kind} rotary scaling a prompt of {int(lengths.min())} tokens gets other angles "
                    f"beside one of {int(longest)} than alone (beyond {limit} positions); run them apart"
                )

    @cached_property
    def _rotations(self) -> list[tuple[str, int]]:
        """The rotary scalings whose angles depend on the longest row of a run, each with the length up to which they
        do not.
        """
        config: Any = self._wrapped.config
        scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        found = []
        # One for all layers, or one for each type of layer.
        for one in [each for each in scaling.values() if isinstance(each, Mapping)] or [scaling]:
            kind = str(one.get("rope_type", one.get("type")))
            if "dynamic" in kind:
                found.append((kind, int(config.max_position_embeddings)))
            elif "short_factor" in one:
                limit = getattr(config, "original_max_position_embeddings", None)
                found.append(("longrope", int(limit or one["original_max_position_embeddings"])))
        return found

    def forget_lengths(self) -> None:
        """Makes the next run compute its rotary angles anew; with dynamic scaling they would be an earlier, longer
        run's.
        """
        for module in modules_of(self._model) if self._rotations else ():
            for name in [each for each in vars(module) if each.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)

    def _flat_at(self, hook: str) -> int | None:
        """Returns the layer of a hook point that has batch and positions on one axis."""
        site, layer = self._sites.get(hook, (hook, None))
        return layer if self.family.flat_mlp and site in _IN_MLP else None

    def _count(self, layer: int) -> Handle:
        start = self._hooks[KINDS["resid_pre"].hook.format(layer)]
        return start.register_forward_hook(
            lambda module, inputs, output: self._lengths.update({layer: output.shape[1]})
        )

    def _by_example(self, layer: int, function: Function) -> Function:
        def apply(flat: Tensor) -> Tensor | None:
            new = function(flat.unflatten(0, (-1, self._lengths[layer])))
            return None if new is None else new.flatten(0, 1)

        return apply


def _seeing(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Clears the rows of an additive mask [batch 1 query key] in float64 that hide every key."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.dtype != torch.float64:
        return None
    empty = (mask <= torch.finfo(mask.dtype).min).all(-1, keepdim=True)
    return args, {**kwargs, "attention_mask": mask.masked_fill(empty, 0.0)}
