"""Tiny float64 models whose every part matters, and a forward pass written by hand to compare with.

The same settings and seed give the same function in every model class: weights are drawn by role, so that the
classes check each other too.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import transformer_lens
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from circuits import CircuitsError

HOOKED, BRIDGE = "HookedTransformer", "TransformerBridge"
# The classes that the installed transformer-lens has; HookedTransformer is gone from 4.0.
FAMILIES = [HOOKED, BRIDGE] if HOOKED in vars(transformer_lens) else [BRIDGE]

SHAPES: dict[str, dict[str, Any]] = {
    "causal": {"attention_dir": "causal", "normalization_type": "LN", "n_layers": 2},
    "bidirectional": {"attention_dir": "bidirectional", "normalization_type": None, "n_layers": 3},
    "attention-only": {
        "attention_dir": "causal",
        "normalization_type": "LNPre",
        "attn_only": True,
        "n_layers": 1,
    },
    "post-norm": {"norm": "post", "attention_dir": "bidirectional", "act_fn": "gelu", "n_layers": 2},
}

ROTARY = {"positional_embedding_type": "rotary"}
RMS = {"normalization_type": "RMS"}
GATED = {"gated_mlp": True, "act_fn": "gelu_new"}
LLAMA = {**RMS, **ROTARY, "n_key_value_heads": 2, "gated_mlp": True, "act_fn": "silu"}
CAPS = {"attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0}
LOCAL = {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 2}
SANDWICH = {"use_normalization_before_and_after": True}
SPLIT = {"use_attn_result": True, "use_split_qkv_input": True}
EVERY_HOOK = {**SPLIT, "use_hook_mlp_in": True}
PARALLEL = {"parallel_attn_mlp": True}

# Beyond these, what a site is compared for with the forward by hand: of both classes,
FEATURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "capped": {
        "n_layers": 1,
        "normalization_type": "RMSPre",
        "attention_dir": "bidirectional",
        **ROTARY,
        **CAPS,
        "rotary_dim": 2,
        "act_fn": "gelu_new",
    },
    "one key head": {
        "n_key_value_heads": 1,
        "attn_scale": 3.0,
        "final_rms": True,
        "d_vocab_out": 7,
        "act_fn": "gelu",
    },
    "six layers": {"n_layers": 6, "normalization_type": "LNPre", "d_mlp": 8},
    "gated": {**GATED, "n_layers": 1},
    "solu": {"n_layers": 1, "act_fn": "solu_ln"},
    "stretched rotary": {**ROTARY, "n_layers": 1, "rope_scaling": {"type": "linear", "factor": 4}},
    "rotary by parts": {
        **ROTARY,
        "rotary_dim": 4,
        "use_NTK_by_parts_rope": True,
        "NTK_original_ctx_len": 8,
        "use_qk_norm": True,
        "scale_attn_by_inverse_layer_idx": True,
        "use_attn_scale": False,
        "n_key_value_heads": 2,
        "ungroup_grouped_query_attention": True,
    },
    "local": {**LOCAL, **ROTARY, "rotary_base_local": 10.0, "rotary_adjacent_pairs": True},
    "alibi": {"positional_embedding_type": "alibi", "use_attn_in": True},
    "shortformer": {**RMS, **SPLIT, "positional_embedding_type": "shortformer"},
    "every hook on": {**EVERY_HOOK, **ROTARY, "rotary_scaling_factor": 4.0},
    "post-norm, causal, every hook on": {**EVERY_HOOK, "norm": "post", "n_layers": 3, "d_vocab_out": 3},
    "post-norm, attention only": {"norm": "post", "attn_only": True},
    "parallel": {**PARALLEL, **ROTARY, "rotary_dim": 2, "act_fn": "gelu", "n_layers": 3},
    "parallel, norms after too, every hook on": {
        **PARALLEL,
        **SANDWICH,
        **GATED,
        **EVERY_HOOK,
        "normalization_type": "RMSPre",
        "n_key_value_heads": 2,
    },
    "gemma": {**LLAMA, **SANDWICH, **CAPS, **LOCAL, "act_fn": "gelu_new", "attn_scale": 3.0},
    "olmo2": {**LLAMA, "original_architecture": "Olmo2ForCausalLM"},
    "olmoe's q and k": {**RMS, "n_layers": 1, "original_architecture": "OlmoeForCausalLM"},
}
# but what one of the classes lacks.
OF_ONE_CLASS = dict.fromkeys(list(FEATURES)[list(FEATURES).index("rotary by parts") :], HOOKED)
OF_ONE_CLASS |= {"solu": FAMILIES[0], "stretched rotary": BRIDGE, "post-norm": HOOKED}
KINDS_OF_MODELS = [
    (name, family)
    for name in SHAPES | FEATURES
    for family in FAMILIES
    if OF_ONE_CLASS.get(name, family) == family
]

_SCALE = {
    "W_Q": 0.4,
    "W_K": 0.4,
    "W_V": 0.3,
    "W_O": 0.4,
    "W_in": 0.3,
    "W_gate": 0.3,
    "W_out": 0.2,
    "W_E": 1.0,
    "W_pos": 0.7,
}


def build(
    seed: int = 0, family: str | None = None, dtype: torch.dtype = torch.float64, **changes: Any
) -> Any:
    """Weights are scaled so that attention is far from uniform and heads and MLPs move the output visibly."""
    sizes: dict[str, Any] = {"d_model": 16, "n_ctx": 6, "d_head": 4, "n_heads": 4, "d_mlp": 24, "d_vocab": 11}
    settings = {
        "n_layers": 2,
        "act_fn": "relu",
        "normalization_type": "LN",
        "device": "cpu",
        **sizes,
        **changes,
    }
    model = _bridge(settings, dtype) if (family or FAMILIES[0]) == BRIDGE else _hooked(settings, dtype)
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            # By role and not in order, as one class lacks some of the other's parameters.
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            role = name.split(".")[-1]
            weight.copy_(drawn * _SCALE.get(role, 0.3) + (1.0 if role == "w" else 0.0))
    return model


def _hooked(settings: dict[str, Any], dtype: torch.dtype) -> Any:
    if settings.get("norm") == "post":
        from tasks.model_building import EPS, PostNormConfig, build_from_config

        return build_from_config(PostNormConfig(eps=EPS, dtype=dtype, **settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        config = transformer_lens.HookedTransformerConfig(dtype=dtype, **settings)
        return transformer_lens.HookedTransformer(config)


def _bridge(settings: dict[str, Any], dtype: torch.dtype) -> Any:
    model = TransformerBridge.boot_native({"seed": 0, **settings}, dtype=dtype)
    # In its first forward a bridge puts hooks of its own onto its norms; they are not what tests look for.
    model(torch.zeros(1, 1, dtype=torch.long))
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by HookedTransformer's names and in its layout, as views of them, for every model class."""
    found = {name.replace("_original_component.", ""): p for name, p in model.named_parameters()}
    if "unembed.W_U" in found:
        return {name.replace("attn._", "attn."): weight for name, weight in found.items()}
    cfg, views = model.cfg, {}
    for name, weight in found.items():
        path, kind = name.replace("layers.", "blocks.").rsplit(".", 1)
        if path in _RENAMED:
            name, weight = _RENAMED[path][kind], weight.T if path == "head" and kind == "weight" else weight
        elif ".attn." in path:
            role = path[-1].upper()
            if role == "O":
                weight = weight if kind == "bias" else weight.T.unflatten(0, (-1, cfg.d_head))
            else:
                weight = weight.unflatten(0, (-1, cfg.d_head))
                weight = weight if kind == "bias" else weight.transpose(1, 2)
            name = f"{path[:-2]}.{'b' if kind == 'bias' else 'W'}_{role}"
        elif ".mlp.ln" in path or ".mlp." not in path:
            name = f"{path.replace('ln_out', 'ln_final')}.{kind[0]}"
        else:
            role = path.split(".")[-1].removeprefix("fc_")
            name = f"{path.rsplit('.', 1)[0]}.{'b' if kind == 'bias' else 'W'}_{role}"
            weight = weight if kind == "bias" else weight.T
        views[name] = weight
    return views


_RENAMED = {
    "tok_embed": {"weight": "embed.W_E"},
    "pos": {"weight": "pos_embed.W_pos"},
    "head": {"weight": "unembed.W_U", "bias": "unembed.b_U"},
}


#: Every message of a CircuitsError that a test here provokes, whole, by file: a test itself asks for a few words of it.
MESSAGES = Path(__file__).parents[1] / "data" / "messages.json"
KEPT = json.loads(MESSAGES.read_text(encoding="utf-8"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, object, object]:
    """Fails a test with a message that is not kept; with --keep, keeps it."""
    raised = []

    def noted(error: CircuitsError, message: str) -> None:
        made(error, message)
        raised.append(re.sub(r"\S*/(tmp|pytest-of-)\S*/|0x[0-9a-f]{6,}|Executor-\d+_\d+", "", str(error)))

    made = CircuitsError.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CircuitsError, "__init__", noted)
        result = yield
    # What Hypothesis draws may depend on its version; transformer-lens 4 has other models to speak of, and shape checks
    # have words of their own.
    is_elsewhere = HOOKED not in FAMILIES or item.get_closest_marker("slow")
    is_elsewhere = is_elsewhere or item.config.getoption("jaxtyping_packages", None)
    if is_elsewhere or hasattr(item.function, "hypothesis"):
        return result
    file = item.nodeid.split("::")[0].removeprefix("tests/circuits/")
    new = sorted(set(raised) - set(KEPT.get(file, ())))
    if new and item.config.getoption("keep"):
        KEPT[file] = sorted({*KEPT.get(file, ()), *new})
        MESSAGES.write_text(
            json.dumps(KEPT, indent=0, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    else:
        assert new == [], "not in tests/data/messages.json: right? then run this test with --keep"
    return result


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is wrong on purpose: a user has no type checker between a call and the function."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    return build


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each model class that is installed."""
    return request.param


@pytest.fixture
def hooked_only() -> str:
    """For what only HookedTransformer has."""
    if HOOKED not in FAMILIES:
        pytest.skip("the installed transformer-lens has no HookedTransformer")
    return HOOKED


@pytest.fixture(params=list(SHAPES))
def model(request: pytest.FixtureRequest, family: str) -> Any:
    if "norm" in SHAPES[request.param] and family != HOOKED:
        pytest.skip("only HookedTransformer has a post-norm form")
    return build(family=family, **SHAPES[request.param])


@pytest.fixture(params=[kind for kind in KINDS_OF_MODELS if kind[0] in FEATURES], ids="-".join)
def featured(request: pytest.FixtureRequest) -> Any:
    """A model with some feature that the shapes lack."""
    name, family = request.param
    return build(family=family, **FEATURES[name])


@pytest.fixture
def causal(family: str) -> Any:
    return build(family=family, **SHAPES["causal"])


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    return torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def other_tokens() -> Tensor:
    return torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=["auto", "naive"])
def each_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the test's module calls `sweep` runs on this engine."""
    from circuits import sweep

    monkeypatch.setattr(request.module, "sweep", partial(sweep, engine=request.param))
    return request.param


@pytest.fixture(scope="session")
def by_hand() -> Callable[..., Tensor]:
    return forward


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    """Equal to 1e-10 of the edit's own effect, which must be at least 1% of the output's s.d."""

    def check(found: Tensor, expected: Tensor, clean: Tensor, tolerance: float = 1e-10) -> None:
        effect = (expected - clean).square().mean().sqrt()
        assert effect >= 0.01 * clean.std(), f"the edit moves the output by {effect:.2g} only"
        assert (found - expected).abs().max() <= tolerance * effect

    return check


def _unchanged(site: str, layer: int | None, value: Tensor) -> Tensor:
    return value


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "solu_ln": lambda x: x * x.softmax(-1),
}


@torch.no_grad()
def forward(
    model: Any, tokens: Tensor, edit: Callable[[str, int | None, Tensor], Tensor] = _unchanged
) -> Tensor:
    """The logits, in float64, from parameters alone; `edit(site, layer, value)` sees and may replace every site."""
    weights, cfg = {name: weight.double() for name, weight in weights_of(model).items()}, model.cfg
    hooked = "embed.W_E" in dict(model.named_parameters())
    batch, length = tokens.shape
    order = torch.arange(length).expand(batch, -1)

    def norm(x: Tensor, name: str, kind: str | None = cfg.normalization_type) -> Tensor:
        if kind is None:
            return x
        if kind.startswith("LN"):
            x = x - x.mean(-1, keepdim=True)
        # The native RMS norm computes in single precision, whatever the model's.
        wide = x.float() if kind == "RMS" and not hooked else x
        scale = (wide.square().mean(-1, keepdim=True) + cfg.eps).sqrt()
        x = (wide / scale).to(x.dtype)
        if kind.endswith("Pre"):
            return x
        return x * weights[f"{name}.w"] + weights.get(f"{name}.b", torch.zeros(()))

    post_norm = getattr(cfg, "norm", "pre") == "post"
    architecture = str(getattr(cfg, "original_architecture", None))
    norms_after_only = hooked and architecture.startswith(("Olmo2", "Olmo3"))
    parallel = hooked and cfg.parallel_attn_mlp

    def on_branch(x: Tensor, name: str) -> Tensor:
        return x if post_norm or norms_after_only else norm(x, name)

    def after_branch(x: Tensor, name: str) -> Tensor:
        if norms_after_only:
            return norm(x, name)
        if hooked and cfg.use_normalization_before_and_after and cfg.normalization_type is not None:
            return norm(x, f"{name}_post", "RMS")
        return x

    def on_stream(x: Tensor, name: str) -> Tensor:
        return norm(x, name) if post_norm else x

    def capped(x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap) if cap > 0 else x

    resid = edit("embed", None, weights["embed.W_E"][tokens])
    aside: Tensor | float = 0.0
    if "pos_embed.W_pos" in weights and cfg.positional_embedding_type != "alibi":
        positions = weights["pos_embed.W_pos"][order]
        positions = edit("pos_embed", None, positions)
        if cfg.positional_embedding_type == "shortformer":
            aside = positions
        else:
            resid = resid + positions
    resid = on_stream(resid, "ln_embed")
    for layer in range(cfg.n_layers):
        path = f"blocks.{layer}"
        attn = {n.split(".")[-1]: w for n, w in weights.items() if n.startswith(f"{path}.attn.")}
        mlp = {n.removeprefix(f"{path}.mlp."): w for n, w in weights.items() if n.startswith(f"{path}.mlp.")}
        if hooked and cfg.ungroup_grouped_query_attention:
            each = cfg.n_heads // cfg.n_key_value_heads
            attn |= {n: attn[n].repeat_interleave(each, 0) for n in ("W_K", "W_V", "b_K", "b_V")}
        resid = edit("resid_pre", layer, resid)
        x = on_branch(resid, f"{path}.ln1")
        read = {"Q": x + aside, "K": x + aside, "V": x}
        q, k, v = (
            edit(s.lower(), layer, torch.einsum("bpd,hde->bphe", read[s], attn[f"W_{s}"]) + attn[f"b_{s}"])
            for s in "QKV"
        )
        if hooked and architecture.startswith("Olmo"):
            q, k = (
                norm_heads(y.flatten(2), weights[f"{path}.attn.{n}_norm.w"], cfg.eps).reshape(y.shape)
                for y, n in ((q, "q"), (k, "k"))
            )
        elif hooked and cfg.use_qk_norm:
            q, k = (
                norm_heads(y, weights[f"{path}.attn.{n}_norm.w"], cfg.eps) for y, n in ((q, "q"), (k, "k"))
            )
        if cfg.positional_embedding_type == "rotary":
            table = _table(model, layer, hooked)
            q, k = (rotated(y, order, cfg, hooked, table) for y in (q, k))
        grouped = cfg.n_heads // k.shape[2]
        k, v = (torch.stack([y[:, :, head // grouped] for head in range(cfg.n_heads)], 2) for y in (k, v))
        scale = cfg.d_head**0.5 if cfg.attn_scale <= 0 else cfg.attn_scale
        if hooked and not cfg.use_attn_scale:
            scale = 1.0
        if hooked and cfg.scale_attn_by_inverse_layer_idx:
            scale = scale * (layer + 1)
        scores = capped(torch.einsum("bqhe,bkhe->bhqk", q, k) / scale, cfg.attn_scores_soft_cap)
        far = torch.arange(length)[:, None] - torch.arange(length)  # query - key
        if cfg.positional_embedding_type == "alibi":
            slope = 2.0 ** (-8.0 / cfg.n_heads * torch.arange(1, cfg.n_heads + 1, dtype=torch.float64))
            scores = scores - slope[:, None, None] * far.clamp(min=0)
        hidden = torch.zeros(batch, 1, length, length, dtype=torch.bool)
        if cfg.attention_dir == "causal":
            hidden = hidden | (far < 0)
            if hooked and cfg.use_local_attn and cfg.attn_types[layer] == "local":
                hidden = hidden | (far >= cfg.window_size)
        scores = edit("scores", layer, scores.masked_fill(hidden, -torch.inf))
        pattern = edit("pattern", layer, scores.softmax(-1).nan_to_num())
        z = edit("z", layer, torch.einsum("bhqk,bkhe->bqhe", pattern, v))
        out = after_branch(torch.einsum("bqhe,hed->bqd", z, attn["W_O"]) + attn["b_O"], f"{path}.ln1")
        before_mlp, resid = resid, resid + edit("attn_out", layer, out)
        if not cfg.attn_only:
            if not parallel:
                before_mlp = resid = on_stream(edit("resid_mid", layer, resid), f"{path}.ln1")
            x = on_branch(edit("mlp_in", layer, before_mlp), f"{path}.ln2")
            act = _ACTIVATIONS[cfg.act_fn]
            if cfg.gated_mlp:
                post = act(edit("mlp_pre", layer, x @ mlp["W_gate"])) * (x @ mlp["W_in"])
                post = post + mlp.get("b_in", torch.zeros(()))
            else:
                post = act(edit("mlp_pre", layer, x @ mlp["W_in"] + mlp["b_in"]))
            if cfg.act_fn.endswith("_ln"):
                post = norm(post, f"{path}.mlp.ln", "LN" if f"{path}.mlp.ln.w" in weights else "LNPre")
            post = edit("mlp_post", layer, post)
            out = after_branch(post @ mlp["W_out"] + mlp.get("b_out", torch.zeros(())), f"{path}.ln2")
            resid = resid + edit("mlp_out", layer, out)
        resid = on_stream(edit("resid_post", layer, resid), f"{path}.ln{1 if cfg.attn_only else 2}")
    last = cfg.normalization_type
    if cfg.final_rms and last is not None:
        last = last.replace("LN", "RMS")
    logits = (resid if post_norm else norm(resid, "ln_final", last)) @ weights["unembed.W_U"]
    # On 4.x the bridge's is a buffer.
    bias = weights["unembed.b_U"] if "unembed.b_U" in weights else model.state_dict()["unembed.bias"].double()
    return capped(logits + bias, cfg.output_logits_soft_cap)


def activations(
    by_hand: Callable[..., Tensor],
    model: Any,
    tokens: Tensor,
    edited: Callable[[str, int | None, Tensor], Tensor] = _unchanged,
) -> tuple[dict[tuple[str, int | None], Tensor], Tensor]:
    """Every activation of a forward by hand as (site, layer) -> tensor, after `edited`; and the output."""
    found: dict[tuple[str, int | None], Tensor] = {}

    def keep(site: str, layer: int | None, x: Tensor) -> Tensor:
        found[site, layer] = edited(site, layer, x)
        return found[site, layer]

    return found, by_hand(model, tokens, keep)


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _table(model: Any, layer: int, hooked: bool) -> tuple[Tensor, Tensor] | None:
    """Where the angles come from a long formula, the cosines and sines that the model itself uses."""
    cfg, attention = model.cfg, model.blocks[layer].attn
    if hooked and (cfg.use_NTK_by_parts_rope or cfg.rotary_base_local or cfg.rotary_scaling_factor != 1):
        return attention.rotary_cos, attention.rotary_sin
    if not hooked and getattr(cfg, "rope_scaling", None):
        return model.original_model.rotary.cos_cached, model.original_model.rotary.sin_cached
    return None


def rotated(
    x: Tensor, positions: Tensor, cfg: Any, hooked: bool, table: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Rotary embedding of x [batch pos head d_head], in pairs of neighbours or of entries half apart."""
    adjacent = cfg.rotary_adjacent_pairs or not hooked
    size = cfg.rotary_dim or cfg.d_head
    half = size // 2
    if table is None:
        # The bridge's table is in single precision, whatever the model's.
        dtype = torch.float64 if hooked else torch.float32
        frequency = 1.0 / (float(cfg.rotary_base) ** (torch.arange(0, size, 2, dtype=dtype) / size))
        angle = positions[:, :, None, None].to(dtype) * frequency
        cos, sin = angle.cos().double(), angle.sin().double()
    else:
        cos, sin = ((one[..., ::2] if adjacent else one[..., :half])[positions][:, :, None] for one in table)
    turning, rest = x[..., :size], x[..., size:]
    even = turning[..., ::2] if adjacent else turning[..., :half]
    odd = turning[..., 1::2] if adjacent else turning[..., half:]
    pair = even * cos - odd * sin, odd * cos + even * sin
    return torch.cat([torch.stack(pair, -1).flatten(-2) if adjacent else torch.cat(pair, -1), rest], -1)


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bridges around small Hugging Face models, by name: `hf_model("llama")`; see families.py."""
    from tests.circuits import families

    return families.Models(tmp_path_factory.mktemp("huggingface"))
