"""The only file that touches a model's structure: sizes, hook points, parameters.

A model is anything with a `cfg` and hook points, told apart by what it has, not by its import path, so that
this package needs no transformer_lens. Hooks are raw torch forward hooks: `reset_hooks` and
`run_with_hooks` of the model keep their own books and leave ours alone, and we theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from circuits.errors import CircuitsError
from circuits.sites import KINDS, Site, SiteKind

# (model class, site) pairs at which a written value is what the model goes on with, established by a random
# write against a hand-written forward (tests/circuits/test_surface.py). In HookedTransformer a hook point
# is a module that stands in line, so a site outside the table may be written too; a class that is not
# listed is refused.
QUALIFIED: dict[str, frozenset[str]] = {"HookedTransformer": frozenset(KINDS)}
IN_LINE = frozenset({"HookedTransformer"})


class Surface:
    """What `circuits` knows of a model. Build it with `Surface.of(model)`."""

    def __init__(self, model: nn.Module) -> None:
        cfg: Any = getattr(model, "cfg", None)
        missing = [size for size in ("n_layers", "n_heads", "d_head", "d_model") if not hasattr(cfg, size)]
        hooks = _hook_points(model)
        if missing or not hooks:
            what = f"no cfg.{missing[0]}" if missing else "no hook points"
            raise CircuitsError(f"{type(model).__name__} is not a hooked transformer: it has {what}")
        families = [base.__name__ for base in type(model).__mro__ if base.__name__ in QUALIFIED]
        if not families:
            raise CircuitsError(
                f"{type(model).__name__} is not served: its hook points are not qualified for writing "
                f"(served: {', '.join(sorted(QUALIFIED))})"
            )
        self.model = model
        self.family = families[0]
        self.hooks: dict[str, nn.Module] = hooks
        for layer in range(cfg.n_layers):
            if not hasattr(model.get_submodule(f"blocks.{layer}"), "mlp"):
                # An attention-only block still owns this hook point, and never calls it.
                hooks.pop(f"blocks.{layer}.hook_mlp_out", None)
        self.n_layers: int = cfg.n_layers
        self.n_heads: int = cfg.n_heads
        key_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
        self.sizes: dict[str, int | None] = {
            "head": cfg.n_heads,
            "d_head": cfg.d_head,
            "d_model": cfg.d_model,
            "d_mlp": getattr(cfg, "d_mlp", None),
        }
        self.heads_at: dict[str, int] = {"k": key_heads, "v": key_heads}
        _refuse_other_blocks(model, hooks, self.n_layers)

    @classmethod
    def of(cls, model: Any) -> Surface:
        if not isinstance(model, nn.Module):
            raise CircuitsError(f"expected a hooked model, got {type(model).__name__}")
        return cls(model)

    def at(self, site: Site, layers: tuple[int, ...] | None = None) -> list[tuple[int | None, str]]:
        """(layer, full hook name) for each place that `site` names, limited to `layers` where given."""
        if site.layer is not None and site.layer >= self.n_layers:
            raise CircuitsError(f"no site {site}: the model has layers 0-{self.n_layers - 1}")
        if site.kind.name not in QUALIFIED[self.family] and self.family not in IN_LINE:
            raise CircuitsError(f"site {site} is not qualified for writing on a {self.family}")
        if not site.kind.per_layer:
            places: list[tuple[int | None, str]] = [(None, site.hook())]
        elif site.layer is not None:
            places = [(site.layer, site.hook())]
        else:
            wanted = range(self.n_layers) if layers is None else layers
            places = [(layer, site.hook(layer)) for layer in wanted]
        present = [(layer, hook) for layer, hook in places if hook in self.hooks]
        if not present:
            here = [kind.name for kind in KINDS.values() if kind.hook.format(0) in self.hooks]
            raise CircuitsError(f"no site {site} in this model; it has {', '.join(here)}")
        return present

    def head_count(self, kind: SiteKind) -> int:
        """Heads on the head axis of `kind`; k and v have fewer where key-value heads are grouped."""
        return self.heads_at.get(kind.name, self.n_heads)

    def shape(self, kind: SiteKind, batch: int, pos: int) -> tuple[int | None, ...]:
        """The shape of an activation, None where the config does not tell."""
        known = {**self.sizes, "head": self.head_count(kind), "batch": batch}
        known |= dict.fromkeys(("pos", "query", "key"), pos)
        return tuple(known.get(axis) for axis in kind.axes)

    def masked_score(self, layer: int) -> float | None:
        """The finite number this model writes into masked scores, where it does not use minus infinity."""
        attention = getattr(self.model.get_submodule(f"blocks.{layer}"), "attn", None)
        ignore = getattr(attention, "IGNORE", None)
        return None if ignore is None else float(ignore)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their name in the state_dict; buffers such as causal masks are not among them."""
        return dict(self.model.named_parameters())

    def on_forward(self, hook: str, function: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call `function` with the activation at `hook`; what it returns, unless None, takes its place."""

        def forward_hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            return function(output)

        return self.hooks[hook].register_forward_hook(forward_hook)

    def on_run(self, function: Callable[[], None]) -> RemovableHandle:
        """Call `function` when the whole model is called."""
        return self.model.register_forward_pre_hook(lambda module, inputs: function())


def _hook_points(model: nn.Module) -> dict[str, nn.Module]:
    listed = getattr(model, "hook_dict", None)
    if isinstance(listed, Mapping) and listed:
        return {name: hook for name, hook in listed.items() if isinstance(hook, nn.Module)}
    return {n: module for n, module in model.named_modules() if n.split(".")[-1].startswith("hook_")}


def _refuse_other_blocks(model: nn.Module, hooks: dict[str, nn.Module], n_layers: int) -> None:
    """Sites mean something else where attention and MLP run side by side, or where a norm follows them."""
    for layer in range(n_layers):
        block = model.get_submodule(f"blocks.{layer}")
        if f"blocks.{layer}.mlp.hook_pre" in hooks and f"blocks.{layer}.hook_resid_mid" not in hooks:
            raise CircuitsError(
                f"block {layer} runs attention and MLP in parallel; circuits serves serial blocks only"
            )
        if hasattr(block, "ln1_post") or "Olmo2" in _architecture(model) or "Olmo3" in _architecture(model):
            raise CircuitsError(
                f"block {layer} normalises after attention; circuits serves pre-norm blocks only"
            )


def _architecture(model: nn.Module) -> str:
    return str(getattr(model.cfg, "original_architecture", None) or "")
