"""Finds the sites of a bridge whose family, settings or versions are not in the table of `families`.

A small random model is made of the config, twice: once with a bridge around it, hooked as `circuits` hooks it, and once
as Hugging Face made it, hooked by torch alone at its own modules (the softmax of attention by a torch function mode). A
site is supported where both hold the same activation and a random write has the same effect on the output, at every
layer. What attention and MLP add must also be the difference of the streams around it. Where the wrapped module
computes attention itself, scores and pattern are met at its softmax in both models; there z must be pattern @ v, too.

A row of the table that was proved with other versions stands where all of it is found again. Processed weights move
what a site holds by a constant, and change no probability: there a write must have the effect on log-probabilities that
it has on the model as it was made.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.bridges.base import BRIDGE
from circuits.model.bridges.compared_sites import BridgeSites, HuggingFaceSites
from circuits.model.bridges.families import AT_SOFTMAX, Family, unproved_version
from circuits.model.interrupts import contextmanager
from circuits.model.sites import KINDS

# Sizes of the small model, by the names that Hugging Face's configs share.
_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 8,
    "rotary_dim": 4,
    "intermediate_size": 40,
    "ffn_dim": 40,
    "n_inner": 40,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "sliding_window": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LENGTH = 6
# Largest difference between the two models, relative to the effect of the write.
_TOLERANCE = 1e-5
# Smallest effect of a write, relative to the output, that shows anything.
_VISIBLE = 1e-3

_known: dict[str, Family | str] = {}


def qualified(model: nn.Module, wrapped: nn.Module, parallel: bool, listed: Family | None = None) -> Family:
    """Returns the sites at which this bridge may be written to, found on a small random model of its config, as a row.

    The result is kept for other models of the same config. Raises `CircuitsError` where the check cannot be made, or
    fails for the model as a whole.

    Args:
        listed: its row in the table, if that was proved with other versions only.
    """
    kind = type(wrapped).__name__
    newer = unproved_version()
    what = f"a TransformerBridge around {kind}" + (f" with {newer}" if newer else "")
    compatible = bool(getattr(model, "compatibility_mode", False))
    processed = bool(getattr(model, "_weights_processed", False))
    try:
        config = _small(wrapped)
        case = [kind, parallel, compatible, processed, newer, config.to_dict()]
        key = json.dumps(case, sort_keys=True, default=str)
        if key not in _known:
            with _aside():
                _known[key] = _check(model, wrapped, config, parallel, compatible, processed, listed)
        found = _known[key]
    except Exception as error:
        whole = "; use enable_compatibility_mode(no_processing=True)" if processed else ""
        raise CircuitsError(
            f"{what} is not in the table of families (circuits.model.bridges.families), and no small model of its "
            f"config can be made to check it with ({type(error).__name__}: {_first_line(error)}){whole}"
        ) from error
    if isinstance(found, str):
        raise CircuitsError(f"{what} is not supported: {found}")
    return found


@contextmanager
def _aside() -> Iterator[None]:
    """Leaves the caller's random numbers alone, shows no warnings (a hook point that is not in line gives one), and
    computes on one thread: products this small take many times as long when several wait for each other.
    """
    threads = torch.get_num_threads()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:80]


def _small(wrapped: nn.Module) -> Any:
    """Returns the config of a small model of the same kind."""
    config: Any = copy.deepcopy(wrapped.config)
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    embedded, width = getattr(config, "word_embed_proj_dim", None), config.hidden_size
    kinds = getattr(config, "layer_types", None)
    for name, size in _SIZES.items():
        if getattr(config, name, None) is not None:
            with suppress(AttributeError):  # computed from the others
                setattr(config, name, size)
    if groups is not None:
        config.num_key_value_heads = 1 if groups == 1 else 4 if groups == heads else 2
    if getattr(config, "word_embed_proj_dim", None) is not None:
        config.word_embed_proj_dim = config.hidden_size if embedded == width else _SIZES["hidden_size"] - 8
    if kinds is not None:
        config.layer_types = (list(dict.fromkeys(kinds)) * 2)[:2]
    rope = getattr(config, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    for one in [each for each in rope.values() if isinstance(each, dict)] or [rope]:
        if one.get("partial_rotary_factor", 1.0) < 1.0:
            one["partial_rotary_factor"] = 0.5  # of an even number of entries
        pairs = int(_SIZES["head_dim"] * one.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            if name in one:
                one[name] = list(one[name][:pairs]) + [1.0] * (pairs - len(one[name]))
    for name in vars(config):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # grouped products are not made in float64
    return config


def _check(
    model: nn.Module,
    wrapped: nn.Module,
    config: Any,
    parallel: bool,
    compatible: bool,
    processed: bool,
    listed: Family | None,
) -> Family | str:
    """Returns the row of the small model, or what is wrong with it as a whole."""
    torch.manual_seed(0)
    plain = type(wrapped)(config).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    tokens = torch.randint(3, _SIZES["vocab_size"], (2, _LENGTH))

    def bridge(**mode: bool) -> Any:
        made = _bridge(model, copy.deepcopy(plain), config)
        if compatible:
            made.enable_compatibility_mode(disable_warnings=True, **mode)
        return made

    as_made = bridge(no_processing=True)
    row = _row(as_made, plain, tokens, parallel, listed)
    if isinstance(row, str) or not processed:
        return row
    ours = BridgeSites(bridge(), row, _log_probabilities)
    theirs = HuggingFaceSites(plain, as_made, row.places, _log_probabilities)
    expected = theirs.run(tokens)
    if not _same(ours.run(tokens), expected, expected):
        return "its processed weights give other probabilities; use enable_compatibility_mode(no_processing=True)"
    proved = _proved(ours, theirs, tokens, sorted(row.sites), effects_only=True)
    return row if proved == row.sites else replace(row, sites=frozenset(proved), paths=False)


def _row(
    bridge: Any, plain: nn.Module, tokens: Tensor, parallel: bool, listed: Family | None
) -> Family | str:
    """Returns the row of a bridge around a copy of `plain`, or what is wrong with it as a whole."""
    kind = type(plain).__name__
    row = Family(kind, kind, frozenset(KINDS), parallel)
    ours, theirs = BridgeSites(bridge, row), HuggingFaceSites(plain, bridge)
    expected = theirs.run(tokens)
    if not _same(ours.run(tokens), expected, expected):
        return (
            "its output is not that of the model it wraps: TransformerLens computes a model of this config wrongly; "
            "try another version of it"
        )
    if listed is not None and _stands(bridge, plain, tokens, listed):
        return listed
    proved = _proved(ours, theirs, tokens, list(KINDS)) - _unsummed(
        ours.read(tokens, _places(KINDS)), parallel
    )
    if not proved & {"resid_pre", "z"}:
        return (
            "writes at resid_pre and z do not have the effect that they have in the model it wraps; it is supported "
            "once its sites are proved and in the table (circuits.model.bridges.families)"
        )
    row = replace(row, sites=frozenset(proved))
    if proved >= AT_SOFTMAX or not {"v", "z"} <= proved:
        return row
    # The bridge may leave attention to the module that it wraps.
    delegated = replace(row, sites=frozenset(KINDS), softmax=True)
    ours = BridgeSites(bridge, delegated)
    with suppress(CircuitsError):  # no single softmax
        if _proved(ours, theirs, tokens, sorted(AT_SOFTMAX)) == AT_SOFTMAX and _weighs(ours, tokens):
            return replace(delegated, sites=frozenset(proved | AT_SOFTMAX))
    return replace(row, sites=frozenset(proved - AT_SOFTMAX))


def _stands(bridge: Any, plain: nn.Module, tokens: Tensor, row: Family) -> bool:
    """Tells whether all that a row of the table says of a bridge around a copy of `plain` is found."""
    ours, theirs = BridgeSites(bridge, row), HuggingFaceSites(plain, bridge, row.places)
    with suppress(CircuitsError):  # no single softmax
        return (
            _proved(ours, theirs, tokens, sorted(row.sites)) == row.sites
            and not _unsummed(ours.read(tokens, _places(row.sites)), row.parallel, post_norm=bool(row.places))
            & row.sites
            and (not row.softmax or _weighs(ours, tokens))
        )
    return False


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


def _places(names: Iterable[str]) -> list[tuple[str, int | None]]:
    return [(name, layer) for name in names for layer in _layers(name)]


def _proved(
    ours: BridgeSites, theirs: HuggingFaceSites, tokens: Tensor, names: list[str], effects_only: bool = False
) -> set[str]:
    """Returns the sites at which both models hold the same, and a random write does the same, at every layer.

    Args:
        effects_only: what the sites hold is not compared.
    """
    expected = theirs.run(tokens)
    places = _places(names)
    mine, seen = ours.read(tokens, places), theirs.read(tokens, places)
    proved = {name for name in names if all((name, layer) in mine for layer in _layers(name))}
    for name, layer in places:
        if name not in proved:
            continue
        here = mine[name, layer]
        same = (name, layer) in seen and (
            effects_only or _same(_visible(here), _visible(seen[name, layer]), _visible(here))
        )
        if not same:
            proved.discard(name)
            continue
        noise = _noise(here)
        if effects_only and name == "pattern":
            # Biases of v are added after it where weights are processed, as if its rows still summed to one.
            noise -= noise.mean(-1, keepdim=True)
        changed = theirs.run(tokens, name, layer, noise)
        effect = changed - expected
        moves = float(effect.abs().max()) > _VISIBLE * float(expected.abs().max())
        if not moves or not _same(ours.run(tokens, name, layer, noise), changed, effect):
            proved.discard(name)
    return proved


def _noise(x: Tensor) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))


def _weighs(ours: BridgeSites, tokens: Tensor) -> bool:
    """Tells whether a pattern, written to, is what z is made with from v, at every layer."""
    for layer in (0, 1):
        clean = ours.read(tokens, [("pattern", layer), ("v", layer)])
        pattern, v = clean["pattern", layer], clean["v", layer]
        noise = _noise(pattern)
        z = ours.read(tokens, [("z", layer)], ("pattern", layer, noise))["z", layer]
        v = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
        if pattern.shape[-1] != v.shape[1]:
            return False
        made = torch.einsum("bhqk,bkhd->bqhd", pattern + noise, v)
        if not _same(z, made, made):
            return False
    return True


def _bridge(model: nn.Module, plain: nn.Module, config: Any) -> Any:
    """Makes a bridge of the same package around a model."""
    package = next(
        base.__module__.partition(".")[0] for base in type(model).__mro__ if base.__name__ == BRIDGE
    )
    builder = import_module(f"{package}.model_bridge.sources._bridge_builder")
    architecture = getattr(model.cfg, "architecture", None) or type(plain).__name__
    return builder.build_bridge_from_module(
        plain, architecture, hf_config=config, dtype=torch.float64, device="cpu"
    )


def _layers(name: str) -> tuple[int | None, ...]:
    return (0, 1) if KINDS[name].per_layer else (None,)


def _visible(x: Tensor) -> Tensor:
    """Returns an activation with masked scores, however low they are, at one value."""
    return x.masked_fill(x < torch.finfo(torch.float32).min / 2, 0.0)


def _same(found: Tensor, expected: Tensor, effect: Tensor) -> bool:
    # A position table may come with a batch of 1.
    if found.shape[1:] != expected.shape[1:] or len(expected) not in (1, len(found)):
        return False
    return bool((found - expected).abs().max() <= _TOLERANCE * effect.abs().max())


def _unsummed(
    seen: dict[tuple[str, int | None], Tensor], parallel: bool, post_norm: bool = False
) -> set[str]:
    """Returns the sites whose sums do not hold: the stream begins as the sum of the embeddings, and attn_out and
    mlp_out are what is added to it.

    Args:
        post_norm: whether the embeddings are normalised before the stream begins, and so is what the MLP adds to.
    """
    wrong: set[str] = set()
    embedded = [seen[name, None] for name in ("embed", "pos_embed") if (name, None) in seen]
    stream = seen.get(("resid_pre", 0))
    if not post_norm and (
        not embedded
        or stream is None
        or any(one.shape[1:] != stream.shape[1:] for one in embedded)
        or not _same(reduce(torch.add, embedded), stream, stream)
    ):
        wrong.add("embed")
    for layer in (0, 1):
        start, middle, end, attention, mlp = (
            seen.get((name, layer))
            for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
        )
        sums = (
            [((start, attention, mlp), end, {"attn_out", "mlp_out", "resid_mid"})]
            if parallel
            else [
                ((start, attention), middle, {"attn_out", "resid_mid"}),
                ((middle, mlp), end, {"mlp_out"}),
            ][: 1 if post_norm else 2]
        )
        for parts, total, names in sums:
            known = [
                part for part in parts if part is not None and total is not None and part.shape == total.shape
            ]
            if total is None or len(known) < len(parts) or not _same(torch.stack(known).sum(0), total, total):
                wrong |= names
    return wrong
