"""Compares what `circuits` reads and writes at each site of one model with plain torch hooks at the model's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from circuits.errors import CircuitsError
from circuits.model.activation_recording import hold_eval_mode, record_activations
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Handle, keep_hooks_on
from circuits.model.prompt_parsing import parse_prompts
from circuits.model.sites import KINDS, Site
from circuits.model.supported_models import check_not_compiled, decided, is_unchecked, unchecked

Place = tuple[str, int | None]

# Largest difference that counts as the same, relative to the effect of the write (of a sum: to its largest entry).
# Norms and softmax of many models are computed in single precision whatever their dtype.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_HALF = 1e-1  # of half precision
# Smallest effect of a write, relative to the output, that shows anything.
_VISIBLE = 1e-3

SAME = "same"


def check(model: nn.Module, tokens: Tensor | None = None) -> pd.DataFrame:
    """Writes noise at every site and layer of a model, and compares the outputs with those of the same write by plain
    torch hooks at the modules that compute the site.

    Also compared: what both read there; that the stream is the sum of what attention and MLP add to it; and, of a
    bridge with its weights as they were, its output with that of the model that it wraps, which is built once more for
    that. A model in no table is supported at the sites found the same from then on.

    Args:
        tokens: inputs [batch pos] to compare on; by default two random rows of up to eight tokens.

    Returns one row for each site and layer: `site`, `layer`, `difference` as a fraction of the write's effect, and
    `verdict`, which is "same" or says what differs.

    Raises:
        CircuitsError: the output of a bridge is not that of the model that it wraps.
    """
    check_not_compiled(model)
    before = decided.pop(model, None)
    unchecked(model)
    try:
        hooked, cfg = HookedModel(model), cast(Any, model.cfg)
        if tokens is None:
            shape = 2, min(8, getattr(cfg, "n_ctx", 8))
            tokens = torch.randint(cfg.d_vocab, shape, generator=torch.Generator().manual_seed(0))
        tokens = parse_prompts(hooked, tokens, "check").tokens
        with hold_eval_mode(model), torch.no_grad():
            rows = _compare_sites(hooked, tokens.to(hooked.device))
    finally:
        decided.pop(model)
        if before is not None:
            decided[model] = before
    frame = pd.DataFrame(rows, columns=["site", "layer", "difference", "verdict"]).astype({"layer": "Int64"})
    if not is_unchecked(model):
        decided[model] = frozenset(frame["site"]) - frozenset(frame.loc[frame["verdict"] != SAME, "site"])
    return frame


def _compare_sites(hooked: HookedModel, tokens: Tensor) -> list[tuple[str, int | None, float, str]]:
    try:
        clean = _logits_of_output(hooked.model(tokens))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CircuitsError(f"check: the model itself does not run on these tokens: {what}") from error
    tolerance = _TOLERANCE.get(clean.dtype, _HALF)
    _check_wrapped_output(hooked.model, tokens, clean, tolerance)
    hooks: dict[Place, str] = {
        (name, layer): kind.hook.format(layer)
        for name, kind in KINDS.items()
        for layer in (range(hooked.n_layers) if kind.per_layer else (None,))
        if kind.hook.format(layer) in hooked.hooks
    }
    with record_activations(hooked, hooks.values()) as seen:
        hooked.model(tokens)
    axes = {place: len(KINDS[place[0]].axes) for place in hooks}
    ours = {at: seen[hook] for at, hook in hooks.items() if hook in seen and seen[hook].ndim == axes[at]}
    verdicts = dict.fromkeys(hooks, "its hook point never fires, or holds something of another shape")
    verdicts |= dict.fromkeys(ours, SAME) | _find_broken_sums(hooked, ours, tolerance)
    rows: list[tuple[str, int | None, float, str]] = []
    for place, verdict in verdicts.items():
        difference = float("nan")
        if verdict == SAME:
            difference, verdict = _write_difference_and_verdict(
                hooked, tokens, place, ours[place], clean, tolerance
            )
        rows.append((*place, difference, verdict))
    return rows


def _write_difference_and_verdict(
    hooked: HookedModel, tokens: Tensor, place: Place, read: Tensor, clean: Tensor, tolerance: float
) -> tuple[float, str]:
    """Returns how far the two writes at one place are apart, as a fraction of the effect, and the verdict."""
    seen: list[Tensor] = []

    def add_noise(x: Tensor) -> Tensor:
        """Returns the activation with noise of its own size."""
        seen.append(x.clone())
        noise = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(x)
        if place[0] == "pattern":
            noise = noise * (x != 0)  # Some models mask after the softmax too.
        return x + noise * _zero_masked_scores(x).std()

    try:
        with _plain_torch_hooks(hooked, len(tokens), *place, add_noise):
            expected = _logits_of_output(hooked.model(tokens))
    except (AttributeError, LookupError, RuntimeError, TypeError):
        return float("nan"), "the model has no module of a known form that computes it"
    effect = float((expected - clean).abs().max())
    if not seen or not effect > _VISIBLE * float(clean.abs().max()):
        return float("nan"), "a write by plain torch hooks has no effect"
    if not _are_close(_zero_masked_scores(read), _zero_masked_scores(seen[0]), tolerance):
        return float("nan"), "it holds something else than the module computes"
    with keep_hooks_on(hooked.model, [hooked.on_forward(Site(*place).hook(), add_noise)]):
        found = _logits_of_output(hooked.model(tokens))
    difference = float((found - expected).abs().max()) / effect
    same = difference <= tolerance
    return difference, SAME if same else "a write has another effect than by plain torch hooks"


def _find_broken_sums(hooked: HookedModel, seen: dict[Place, Tensor], tolerance: float) -> dict[Place, str]:
    """Returns what is not added to the stream as its name says, with the sum that does not hold."""
    # In a post-norm model the sums are normalised, but for that of attention.
    bridge = hooked.huggingface
    normalised = hooked.post_norm or bool(bridge is not None and bridge.family.places)
    sums: list[tuple[list[Place], Place, list[Place]]] = []  # parts, total, and which of them are blamed
    embedded: list[Place] = [(site, None) for site in hooked.embeddings]
    if not normalised:
        sums.append((embedded, ("resid_pre", 0), embedded[:1]))
    for layer in range(hooked.n_layers):
        start, middle, end, attention, mlp = (
            (name, layer) for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
        )
        if hooked.parallel:
            sums.append(([start, attention, mlp], end, [attention, mlp]))
            continue
        sums.append(([start, attention], middle, [attention, middle]))
        if not normalised:
            sums.append(([middle, mlp], end, [mlp]))
    wrong: dict[Place, str] = {}
    for parts, total, blamed in sums:
        parts = [part for part in parts if part in seen or part[0] != "pos_embed"]
        if not all(place in seen for place in (*parts, total)):
            continue
        shape = seen[total].shape[1:]
        matching = all(seen[part].shape[1:] == shape for part in parts)
        if not matching or not _are_close(
            reduce(torch.add, (seen[part] for part in parts)), seen[total], tolerance
        ):
            text = " + ".join(name for name, _ in parts) + f" is not {total[0]}"
            wrong.update(dict.fromkeys(blamed, text))
    return wrong


def _check_wrapped_output(model: nn.Module, tokens: Tensor, clean: Tensor, tolerance: float) -> None:
    """Refuses a bridge whose output is not that of the model it wraps, built once more with the same weights."""
    wrapped: Any = model.__dict__.get("original_model")
    config = getattr(wrapped, "config", None)
    if config is None or getattr(model, "_weights_processed", False) or not hasattr(config, "to_dict"):
        return
    state = {name.replace("_original_component.", ""): x for name, x in wrapped.state_dict().items()}
    with torch.random.fork_rng(devices=[]):
        plain = type(wrapped)(config).to(device=tokens.device, dtype=next(model.parameters()).dtype).eval()
    if set(plain.state_dict()) - set(state):
        return  # The bridge keeps some weights under other names.
    plain.load_state_dict(state, strict=False)
    if not _are_close(clean, _logits_of_output(plain(tokens, use_cache=False)), tolerance):
        raise CircuitsError(
            f"check: the output of this bridge is not that of the {type(wrapped).__name__} that it wraps: "
            "TransformerLens computes a model of this config wrongly; try another version of it"
        )


def _logits_of_output(output: Any) -> Tensor:
    output = getattr(output, "logits", output)
    logits: Tensor = output[0] if isinstance(output, tuple) else output
    return logits


def _zero_masked_scores(x: Tensor) -> Tensor:
    """Returns an activation with masked scores, however low they are, at zero."""
    return x.masked_fill(x < torch.finfo(torch.float16).min / 2, 0.0)


def _are_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    # A position table may come with a batch of 1.
    batches = 1 in (len(expected), len(found), len(found) / len(expected))
    if not batches or found.shape[1:] != expected.shape[1:]:
        return False
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@contextmanager
def _plain_torch_hooks(
    hooked: HookedModel, batch: int, site: str, layer: int | None, function: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Writes to a site inside the block by hooks of torch alone, at the module that computes it."""
    heads = hooked.head_count(KINDS[site]) if hooked.bridged and site in ("q", "k", "v", "z") else None

    def apply_in_site_shape(x: Tensor) -> Tensor:
        """Applies the function where a module has batch and positions, or the heads, on one axis."""
        whole = x if x.ndim > 2 else x.unflatten(0, (batch, -1))
        new = function(whole if heads is None or x.ndim == 4 else whole.unflatten(-1, (heads, -1)))
        return new.reshape(x.shape)

    if site in ("scores", "pattern"):
        with _PlainSoftmaxHook(layer or 0, function, before=site == "scores"):
            yield
        return
    block: Any = hooked.model if layer is None else hooked.block_modules[layer]
    streams: list[Tensor] = []

    def edit_stream_with_added(added: Tensor) -> Tensor:
        return apply_in_site_shape(streams[-1] + added) - streams[-1]

    if site != "resid_mid" or (hooked.huggingface and site in hooked.huggingface.family.places):
        handles = [_hook_module(*_find_site_module(hooked, block, site, layer), apply_in_site_shape)]
    else:
        attention = _find_site_module(hooked, block, "attn_out", layer)
        handles = [
            _hook_module(block, True, streams.append),
            _hook_module(*attention, edit_stream_with_added),
        ]
    with keep_hooks_on(hooked.model, handles):
        yield


def _find_site_module(
    hooked: HookedModel, block: Any, site: str, layer: int | None
) -> tuple[nn.Module, bool]:
    """Returns the module that reads or computes a site, and whether the site is its input."""
    places = {} if hooked.huggingface is None else hooked.huggingface.family.places
    part = partial(reduce, getattr)
    if layer is None:
        return getattr(block, site), False
    if site in places:
        *names, point = places[site].split(".")[2:]
        return part(names, block), point == "hook_in"
    if site == "resid_pre" or (site == "resid_post" and not hooked.post_norm):
        return block, site == "resid_pre"
    if site in ("attn_out", "mlp_out"):
        norm = hooked.sublayer_norm_path(site, layer)
        if norm is not None:
            return hooked.model.get_submodule(norm), False
        # An MLP that is not a module of its own (OPT, BERT) ends with its last matrix.
        ends = site == "mlp_out" and hooked.bridged and hasattr(block.mlp, "out")
        return part(["mlp", "out"] if ends else [site.removesuffix("_out")], block), False
    if not hooked.bridged:
        return hooked.hooks[KINDS[site].hook.format(layer)], False
    if site == "mlp_pre":
        return part(["mlp", "gate" if hasattr(block.mlp, "gate") else "in"], block), False
    if site in ("q", "k", "v"):
        return part(["attn", site], block), False
    return part(["attn", "o"] if site == "z" else ["mlp", "out"], block), True


def _hook_module(module: nn.Module, before: bool, function: Callable[[Tensor], Tensor | None]) -> Handle:
    """Hooks the input or the output of a module."""

    def edit_input(module: nn.Module, inputs: tuple[Any, ...], given: dict[str, Any]) -> Any:
        new = function(inputs[0] if inputs else given["hidden_states"])
        if new is None:
            return None
        return ((new, *inputs[1:]), given) if inputs else (inputs, {**given, "hidden_states": new})

    def edit_output(module: nn.Module, inputs: Any, output: Any) -> Any:
        new = function(output[0] if isinstance(output, tuple) else output)
        return (new, *output[1:]) if isinstance(output, tuple) and new is not None else new

    if before:
        return module.register_forward_pre_hook(edit_input, with_kwargs=True)
    return module.register_forward_hook(edit_output)


class _PlainSoftmaxHook(TorchFunctionMode):
    """Changes what the softmax of one layer's attention is given, or what it gives."""

    def __init__(self, layer: int, function: Callable[[Tensor], Tensor], before: bool) -> None:
        super().__init__()
        self._layer, self._function, self._before = layer, function, before
        self._seen = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Inside this method the mode is off, so that a softmax which calls another is seen once.
        is_pattern = getattr(func, "__name__", "") == "softmax" and bool(args) and args[0].ndim == 4
        self._seen += is_pattern
        here = is_pattern and self._seen == self._layer + 1
        if here and self._before:
            args = (self._function(args[0]), *args[1:])
        output = func(*args, **(kwargs or {}))
        return self._function(output) if here and not self._before else output
