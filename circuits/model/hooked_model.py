"""The interface through which `circuits` uses a model: its sizes, hook points and parameters.

A model is anything with a `cfg` and hook points, recognised by its class name and attributes, so that
this package needs no transformer_lens. Hooks are raw torch forward hooks: `reset_hooks` and
`run_with_hooks` of the model track the model's own hooks, and leave ours alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.bridge_hooks import BRIDGE, HuggingFaceBridgeHooks, make_bridge_hooks
from circuits.model.edit_state import get_edit_state
from circuits.model.hooks import (
    Function,
    Handle,
    MethodWrapper,
    RevocableFunction,
    bind_arguments,
    hook_module_input,
    hook_module_output,
    run_hooked_module,
)
from circuits.model.prompts_with_mask import Prompts
from circuits.model.sites import GROUPED, KINDS, Site, SiteKind
from circuits.model.supported_models import (
    FAMILIES,
    NORMS_AFTER_ONLY,
    check_not_compiled,
    is_unchecked,
    sites_of_unlisted_model,
    untested_setting,
)

#: The classes that are supported; of a bridge, the sites of the table alone.
SUPPORTED = ("HookedTransformer", BRIDGE)

Begin = Callable[[tuple[Any, ...], Mapping[str, Any]], None]
INSIDE = "a hook, or the function of an edit, runs the model inside its run; call it before, and keep what it gives"


class HookedModel:
    """Gives access to the sizes, hook points and weights of a model. Build it with `HookedModel(model)`."""

    def __init__(self, model: Any) -> None:
        """Reads a model's hook points, form and sizes; refuses models whose hooks are not proved to act."""
        check_not_compiled(model)
        hooks = {
            name: hook
            for name, hook in getattr(model, "hook_dict", {}).items()
            if isinstance(hook, nn.Module)
        }
        self.model: nn.Module = model
        self.family = _find_supported_class(model, hooks)
        cfg: Any = model.cfg
        self.n_layers: int = cfg.n_layers
        self.n_heads: int = cfg.n_heads
        self.hooks: dict[str, nn.Module] = hooks
        #: What the model calls, layer by layer.
        self.block_modules: list[nn.Module] = list(model.get_submodule("blocks").children())
        self.bridged = self.family == BRIDGE
        # Stands for the call of `run_forward` that is under way.
        self._forward: object | None = None
        self._drop_unusable_hooks()
        #: True if each residual sum is normalised to become the stream, with no norm before attention and MLP.
        self.post_norm: bool = "blocks.0.hook_normalized_resid_post" in hooks
        #: True if the MLP of a block reads what its attention reads; then there is no resid_mid.
        self.parallel: bool = any(
            f"blocks.{layer}.mlp.hook_pre" in hooks and f"blocks.{layer}.hook_resid_mid" not in hooks
            for layer in range(self.n_layers)
        )
        #: True if ln1 and ln2 normalise what attention and MLP add, and nothing what they read.
        self.norms_after_only: bool = (
            not self.bridged and getattr(cfg, "original_architecture", None) in NORMS_AFTER_ONLY
        )
        # A bridge drops the hooks that its model never calls.
        self._bridge = make_bridge_hooks(model, hooks, self.parallel) if self.bridged else None
        #: The sites whose sum is the first residual stream. A shortformer adds positions to what queries and keys read.
        self.embeddings = ["embed"] if KINDS["embed"].hook in hooks else []
        if (
            KINDS["pos_embed"].hook in hooks
            and getattr(cfg, "positional_embedding_type", None) != "shortformer"
        ):
            self.embeddings.append("pos_embed")
        #: The hooks of a bridge around a Hugging Face model; None for other models.
        self.huggingface = self._bridge if isinstance(self._bridge, HuggingFaceBridgeHooks) else None
        #: The hook points of the autoencoders that are spliced in now.
        self.spliced = {
            name: point
            for splice in get_edit_state(model).splices.values()
            for name, point in splice.hook_points.items()
        }
        hooks.update(self.spliced)
        # transformer-lens 3 calls a BERT causal.
        masked = str(getattr(cfg, "architecture", None)).endswith("ForMaskedLM")
        #: Whether no query sees a key behind it.
        self.causal = getattr(cfg, "attention_dir", None) in (None, "causal") and not masked
        ungrouped = not self.bridged and getattr(cfg, "ungroup_grouped_query_attention", None)
        #: The number of heads at k and v: fewer than `n_heads` under grouped-query attention.
        self.key_value_heads: int = (not ungrouped and getattr(cfg, "n_key_value_heads", None)) or cfg.n_heads
        self.sizes: dict[str, int | None] = {
            "head": cfg.n_heads,
            "d_head": cfg.d_head,
            "d_model": cfg.d_model,
            "d_mlp": getattr(cfg, "d_mlp", None),
        }

    def _drop_unusable_hooks(self) -> None:
        """Removes hook points that the model has and never calls, and those of sites that are not supported."""
        for layer, block in enumerate(self.block_modules):
            if not hasattr(block, "mlp"):
                self.hooks.pop(f"blocks.{layer}.hook_mlp_out", None)
        if getattr(self.model.cfg, "positional_embedding_type", None) == "alibi":
            self.hooks.pop("hook_pos_embed", None)
        untested = None if self.bridged else untested_setting(self.model)
        served = KINDS.keys() if untested is None else sites_of_unlisted_model(self.model, untested)
        for kind in KINDS.values():
            for layer in range(self.n_layers if kind.name not in served else 0):
                self.hooks.pop(kind.hook.format(layer), None)

    def hooks_at(self, site: Site, layers: tuple[int, ...] | None = None) -> list[tuple[int | None, str]]:
        """Returns (layer, full hook name) for each place that `site` names, limited to `layers` where given."""
        if site.layer is not None and site.layer >= self.n_layers:
            raise CircuitsError(f"no site {site}: the model has layers 0-{self.n_layers - 1}")
        if site.name not in KINDS and site.kind.base_site == site.name and site.hook(0) not in self.hooks:
            short = site.name.rpartition(".")[2].removeprefix("hook_")
            meant = f"; did you mean {short}, or {short}.0 for layer 0?" if short in self.site_names() else ""
            raise CircuitsError(
                f"no site {site} in this model{meant or '; it has ' + ', '.join(self.site_names())}"
            )
        if self.bridged and site.kind.base_site not in KINDS:
            raise CircuitsError(f"site {site} is not supported on a {BRIDGE}: a write may reach nothing")
        wanted: Iterable[int | None] = range(self.n_layers) if layers is None else layers
        if site.layer is not None or not site.kind.per_layer:
            wanted = [site.layer]
        present = [(layer, site.hook(layer)) for layer in wanted if site.hook(layer) in self.hooks]
        if not present:
            there = f"in this model; it has {', '.join(self.site_names())}"
            if site.kind.base_site != site.name:
                there = ": no autoencoder is spliced in there; circuits.splice does that"
            raise CircuitsError(f"no site {site} {there}".replace(" :", ":"))
        return present

    def site_names(self) -> list[str]:
        """Returns the sites of the table that the model has."""
        return [kind.name for kind in KINDS.values() if kind.hook.format(0) in self.hooks]

    def has_kv_groups(self, kind: SiteKind) -> bool:
        """Tells whether the head axis of a site holds key-value groups, that several heads share."""
        grouped = kind.head_axis is not None and kind.base_site in GROUPED
        return grouped and self.key_value_heads != self.n_heads

    def head_count(self, kind: SiteKind) -> int:
        """Returns the size of the head axis of `kind`; k and v have fewer where key-value heads are grouped."""
        return self.key_value_heads if kind.base_site in GROUPED else self.n_heads

    def unit_count(self, kind: SiteKind, hook: str) -> int | None:
        """Returns the number of neurons or features at a hook; None where there are none, or the config gives none."""
        if kind.unit != "feature":
            return self.sizes["d_mlp"] if kind.unit else None
        return next(
            splice.width
            for splice in get_edit_state(self.model).splices.values()
            if hook in splice.hook_points
        )

    def post_norm_path_after(self, site: str, layer: int | None) -> str | None:
        """Returns the path of the norm that the residual stream itself passes after embed (the sum of the embeddings),
        resid_mid or resid_post; None where there is none.
        """
        if not self.post_norm:
            return None
        if layer is None:
            return "ln_embed" if hasattr(self.model, "ln_embed") else None
        first = site == "resid_mid" or not hasattr(self.block_modules[layer], "mlp")
        return f"blocks.{layer}.{'ln1' if first else 'ln2'}"

    def sublayer_norm_path(self, site: str, layer: int) -> str | None:
        """Returns the path of the norm that attn_out or mlp_out has passed before it is added to the stream; None where
        there is none.
        """
        norm = "ln1" if site == "attn_out" else "ln2"
        norm = norm if self.norms_after_only else f"{norm}_post"
        return f"blocks.{layer}.{norm}" if hasattr(self.block_modules[layer], norm) else None

    def block_module(self, layer: int) -> Any:
        """Returns the module whose attributes ln1, ln2 and mlp are the parts of a block, with their hook points."""
        return self.block_modules[layer] if self._bridge is None else self._bridge.block_module(layer)

    def is_weight_input_first(self, path: str) -> bool:
        """Tells whether the weight of a linear map of a bridge is [in out], as in GPT-2, and not [out in]."""
        module: Any = self.model
        for name in path.split("."):
            module = module[int(name)] if name.isdigit() else getattr(module, name)
        return type(getattr(module, "original_component", module)).__name__ == "Conv1D"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by their name in the state_dict, without buffers such as causal masks.

        A tied parameter stands under each of its names.
        """
        tensors = self.model.state_dict(keep_vars=True)
        for name, value in tensors.items():
            # In 4.x the weight processing of TransformerBridge folds the bias of the final norm into this buffer.
            if name == "unembed.bias" and not isinstance(value, nn.Parameter) and bool(value.any()):
                raise CircuitsError(
                    f"{name} is set, and no parameter, in a model processed by enable_compatibility_mode: its "
                    "weights cannot be exchanged; use no_processing=True"
                )
        return {name: value for name, value in tensors.items() if isinstance(value, nn.Parameter)}

    def check_prompts(self, prompts: Prompts, what: str) -> None:
        """Refuses token ids and lengths that the model has no embedding for, inputs that its own forward does not take,
        and rows that would not get what each gets alone: padding that the model would not mask, rotary angles of a
        longer row.
        """
        tokens = prompts.tokens
        if not len(tokens):
            raise CircuitsError(f"{what}: no example is given")
        if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
            dtype = str(tokens.dtype).removeprefix("torch.")
            raise CircuitsError(f"{what} [batch pos] are whole numbers, got {dtype} {list(tokens.shape)}")
        # Negative ids would count from the end of the table.
        d_vocab, low, high = getattr(self.model.cfg, "d_vocab", None), int(tokens.min()), int(tokens.max())
        if isinstance(d_vocab, int) and d_vocab > 0 and not (low >= 0 and high < d_vocab):
            raise CircuitsError(f"{what} are {low} to {high}; the model has ids 0-{d_vocab - 1}")
        # The tables of positions and rotations and the causal mask all have this length.
        longest = getattr(self.model.cfg, "n_ctx", None)
        if isinstance(longest, int) and tokens.shape[1] > longest:
            raise CircuitsError(
                f"{what} are {list(tokens.shape)} [batch pos]; the model has room for {longest} positions"
            )
        wrapped: Any = self.model.__dict__.get("original_model", self.model)
        for name in prompts.extra:
            # GPT-2 and GPT-J would look segments up in the table of tokens, at whose hook point the site `embed` is.
            segments = getattr(getattr(wrapped, "config", None), "type_vocab_size", None)
            unknown = name not in inspect.signature(wrapped.forward).parameters
            if unknown or (name == "token_type_ids" and not segments):
                lacks = f"takes no {name}" if unknown else f"has no table of segments for {name}"
                raise CircuitsError(f"{what}: {type(wrapped).__name__} {lacks}; leave it out")
        if self.huggingface is not None:
            self.huggingface.check_equal_lengths_for_rotary(prompts, what)
        if prompts.padded and not self.bridged and not self.causal:
            raise CircuitsError(
                f"{what} have padding, which a {self.family} masks in causal attention only; give prompts of one length"
            )

    def tokens_and_arguments(self, prompts: Prompts) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns tokens, and the arguments that make each row what the prompt alone gives."""
        tokens = prompts.tokens.to(self.device, copy=True)
        arguments: dict[str, Tensor] = {name: x.to(self.device) for name, x in prompts.extra.items()}
        if prompts.mask is not None:
            mask = arguments["attention_mask"] = prompts.mask.to(self.device).long()
            if self._bridge is not None and self._needs_position_ids():
                arguments.setdefault("position_ids", (mask.cumsum(1) - 1).clamp(min=0))
        return tokens, arguments

    def run_forward(self, prompts: Prompts) -> Any:
        """Returns the model's output on inputs, each row as the prompt alone gives it."""
        tokens, arguments = self.tokens_and_arguments(prompts)
        bridge = self.huggingface
        if bridge is not None:
            bridge.reset_rotary_cache()
        self._forward = object()
        try:
            with nullcontext() if bridge is None or prompts.mask is None else bridge.empty_queries_unmasked():
                return self.model(tokens, **arguments)
        finally:
            self._forward = None

    def _needs_position_ids(self) -> bool:
        """Tells whether a wrapped model takes positions, and does not derive them from the mask itself."""
        derives = getattr(self.model, "_accepts_derived_position_ids", None)
        wrapped: Any = self.model.__dict__["original_model"]
        accepted = inspect.signature(wrapped.forward).parameters
        return (derives is None or derives()) and "position_ids" in accepted

    def on_forward(self, hook: str, function: Function) -> Handle:
        """Calls `function` with the activation at `hook`; its return value, unless None, replaces the activation.

        Functions at one hook are called in the order in which they were added, each with the activation that the one
        before left. `remove()` of the handle removes all traces of the function.
        """
        revocable = RevocableFunction(function, self.model)
        if self._bridge is None or hook in self.spliced:
            handle = hook_module_output(self.hooks[hook], revocable)
        else:
            handle = self._bridge.on_forward(hook, revocable)
        revocable.handles = (handle,)
        return revocable

    def on_input(self, hook: str, function: Function) -> Handle:
        """Calls `function` with the input of the hook point, before any other hook there; its return value, unless
        None, replaces the input.
        """
        revocable = RevocableFunction(function, self.model)
        if self._bridge is None or hook in self.spliced:
            handle = hook_module_input(self.hooks[hook], revocable)
        else:
            handle = self._bridge.on_input(hook, revocable)
        revocable.handles = (handle,)
        return revocable

    def apply_hooks(self, hook: str, activation: Tensor) -> Tensor:
        """Returns an activation after all hooks at a hook point; the same object where nothing changes it.

        The activation itself is not written to, as hooks may work in place and the run will reach them again.
        """
        if self._bridge is None or hook in self.spliced:
            return run_hooked_module(self.hooks[hook], activation)
        return self._bridge.apply_hooks(hook, activation)

    def on_mlp_input(self, layer: int, function: Function) -> Handle:
        """Calls `function` with the residual stream that the MLP of a layer reads; its return value is what the MLP
        reads instead.
        """
        revocable = RevocableFunction(function, self.model)
        if self._bridge is not None and not self.parallel:
            # The hook point of ln2 feeds only the MLP; the function runs after all hooks that are there now.
            point = self.hooks[KINDS["resid_mid"].hook.format(layer)]
            revocable.handles = (hook_module_output(point, revocable),)
            return revocable
        block: Any = self.block_module(layer)
        if not self.bridged and getattr(self.model.cfg, "use_hook_mlp_in", None):
            reader = block.hook_mlp_in
        elif self.post_norm or self.norms_after_only:
            # The MLP reads the stream as it is.
            reader = block.mlp
        else:
            reader = getattr(block, "ln2", block.ln1)
            if reader is block.ln1:
                raise CircuitsError(
                    f"blocks.{layer}: ln1 and ln2 are one module, so what the MLP reads cannot be told from what "
                    "attention reads; give each its own, with the same parameters"
                )
        revocable.handles = (hook_module_input(reader, revocable),)
        return revocable

    @property
    def setting_if_unchecked(self) -> dict[str, str]:
        """What the settings of a result say of the model: "unchecked", with what was not tested; else nothing."""
        if not is_unchecked(self.model):
            return {}
        what = untested_setting(self.model) if self.huggingface is None else self.huggingface.family.wrapped
        return {"unchecked": what or self.family}

    def check_path_patching_proved(self) -> None:
        """Refuses a bridge around a Hugging Face model whose paths were not compared with a forward by hand."""
        bridge = self.huggingface
        if bridge is not None and not bridge.family.paths and not is_unchecked(self.model):
            served = ", ".join(family.name for family in FAMILIES if family.paths)
            raise CircuitsError(
                f"paths on a TransformerBridge around {bridge.family.wrapped} were not compared with a forward by "
                f"hand (compared: {served}); use patch.activations, or circuits.unchecked(model)"
            )

    def on_run(
        self, begin: Begin = lambda args, kwargs: None, end: Callable[[], None] = lambda: None
    ) -> Handle:
        """Calls `begin(args, kwargs)` whenever the whole model starts to run, and `end()` when it has ended or failed;
        refuses a hook that runs the model inside a run.

        kwargs are all arguments by name, those in `args` too.
        """
        started = RevocableFunction(begin, self.model)
        over = RevocableFunction(end, self.model, ignores_others=True)
        running = False
        latest: object | None = None

        def begin_and_end_around(
            method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            nonlocal running, latest
            # A hook on the model itself acts when the run has ended, in the same call of `run_forward`.
            if running or (latest is not None and latest is self._forward):
                raise CircuitsError(INSIDE)
            running, latest = True, self._forward
            try:
                started(*named(args, kwargs))
                return method(*args, **kwargs)
            finally:
                running = False
                over()

        # `run_with_hooks` and `run_with_cache` bypass a bridge's own forward; every run calls the model that it wraps.
        owner, named = self.model, self._name_arguments
        if self._bridge is not None:
            owner, named = self._bridge.wrapped, self._bridge.to_bridge_arguments
        # Not hooks of the model: `generate` and `run_with_hooks` pass these by.
        started.handles = (over, MethodWrapper(owner, "forward", begin_and_end_around))
        return started

    def _name_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Returns the arguments of a call of a HookedTransformer, and all of them by name."""
        # A user's subclass may take *args and hand them on, so the signature is that of the supported class.
        family: Any = next(base for base in type(self.model).__mro__ if base.__name__ == self.family)
        return args, bind_arguments(family.forward, args, kwargs)

    def tokens_of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Returns the inputs [batch pos ...] of a call of the model, of texts the tokens that it makes; None where they
        are neither.
        """
        given = args[0] if args else kwargs.get("input")
        if self._bridge is None and is_text_input(given):
            # As its forward does; a bridge's wrapped model gets tokens.
            model: Any = self.model
            given = model.to_tokens(
                given, **{name: kwargs[name] for name in ("prepend_bos", "padding_side") if name in kwargs}
            )
        if not isinstance(given, Tensor):
            return None
        return given.unsqueeze(0) if given.ndim == 1 else given


def _find_supported_class(model: nn.Module, hooks: Mapping[str, nn.Module]) -> str:
    """Returns the name of the supported class that a model is of; refuses other models, and says what would do."""
    name, cfg = type(model).__name__, getattr(model, "cfg", None)
    missing = [size for size in ("n_layers", "n_heads", "d_head", "d_model") if not hasattr(cfg, size)]
    ancestors = [base.__name__ for base in type(model).__mro__]
    if (missing or not hooks) and "PreTrainedModel" in ancestors:
        raise CircuitsError(
            f"{name} is a Hugging Face model, without hook points; a bridge around it has them: "
            "TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer)"
        )
    if missing or not hooks:
        what = f"no cfg.{missing[0]}" if missing else "no hook points"
        raise CircuitsError(
            f"{name} is not a hooked transformer: it has {what}. Copy its weights into a HookedTransformer or a "
            "TransformerBridge, or give outputs of your own edits to circuits.compare"
        )
    families = [one for one in ancestors if one in SUPPORTED]
    if not families:
        raise CircuitsError(
            f"{name} is not supported; give a {' or a '.join(SUPPORTED)}, or outputs of your own edits to "
            "circuits.compare"
        )
    if not hasattr(model, "blocks"):
        raise CircuitsError(
            f"this {families[0]} has no blocks that follow each other, but an encoder and a decoder or other parts; "
            "circuits supports models of one stack"
        )
    return families[0]


def is_text_input(given: Any) -> bool:
    """Tells whether a model is called with a text or a list of texts."""
    return isinstance(given, str) or (
        isinstance(given, list) and bool(given) and all(isinstance(one, str) for one in given)
    )
