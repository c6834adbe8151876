"""Small random models of Hugging Face classes in local folders, bridges around them, and one forward written by hand.

`save(name, folder)` writes a model and its tokenizer, `boot(folder)` makes a bridge of it, `hf_model` (a fixture of
conftest) does both once a session. `forward` computes the logits from the weights alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

WORDS = 50  # ids 0 (padding), 1 (bos), 2 (eos), and the words "w0" to "w46"
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROTARY = {"rope_type": "default", "rope_theta": 100.0}
_GROUPED = {"num_key_value_heads": 2, "rope_parameters": _ROTARY}
# Four of a head's six entries turn.
_PARTLY = {"rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.7}}

# The config's class, and its settings beyond SIZES. The window is shorter than the tests' prompts; where it can be,
# a head is not as wide as its share of the stream.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_inner": 32}),
    "pythia": ("GPTNeoXConfig", {**_PARTLY, "use_parallel_residual": True}),
    "neox": ("GPTNeoXConfig", {**_PARTLY, "use_parallel_residual": False}),
    "llama": ("LlamaConfig", {**_GROUPED, "head_dim": 8}),
    "qwen2": ("Qwen2Config", _GROUPED),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 4, "head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {
            **_GROUPED,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "phi": ("PhiConfig", _PARTLY),
    "gptj": ("GPTJConfig", {"rotary_dim": 4, "n_inner": 32}),
    "opt": ("OPTConfig", {"ffn_dim": 32, "word_embed_proj_dim": 24}),
    "bert": ("BertConfig", {"is_decoder": False}),
}
NAMES = list(CONFIGS)

# Classes outside the table, and the sites that `check` does not find the same: they are not there, not what is
# added to the stream, or not shown. docs/circuits/index.md lists them.
_SCALED = {"embed", "attn_out", "resid_mid", "mlp_out"}
UNLISTED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "granite": (
        "GraniteConfig",
        {**_GROUPED, "residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.3},
        {"pos_embed", *_SCALED},
    ),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}, {"pos_embed", *_SCALED} - {"mlp_out"}),
    "phi3": ("Phi3Config", _GROUPED, {"pos_embed"}),
    "falcon": (
        "FalconConfig",
        {"multi_query": True, "parallel_attn": True, "bias": False},
        {"pos_embed", "resid_mid"},
    ),
    "falcon-rw": (
        "FalconConfig",
        {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        {"pos_embed"},
    ),
    "mixtral": (
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"pos_embed", "mlp_pre", "mlp_post"},
    ),
    "olmo2": ("Olmo2Config", _GROUPED, {"pos_embed"}),
    "gemma3": ("Gemma3TextConfig", {**_GROUPED, "head_dim": 8, "sliding_window": 4}, {"pos_embed"}),
    "gpt-oss": (
        "GptOssConfig",
        {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"pos_embed", "scores", "pattern", "mlp_pre", "mlp_post"},
    ),
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(WORDS - 3))]
    vocabulary = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def save(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a random model and its tokenizer into `folder`; every weight and bias matters."""
    kind, settings = CONFIGS[name] if name in CONFIGS else UNLISTED[name][:2]
    config = getattr(transformers, kind)(**{**SIZES, **settings, **changes})
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = auto.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def boot(folder: Path, mode: str = "raw", dtype: torch.dtype = torch.float64, device: str = "cpu") -> Any:
    """Makes a bridge of the model in `folder`.

    Args:
        mode: "raw", "compatible" (compatibility mode, weights as they are) or "processed".
    """
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(str(folder), dtype=dtype, device=device)
    if mode != "raw":
        with warnings.catch_warnings():
            # BERT's norms cannot be folded, which is said and done without.
            warnings.simplefilter("ignore", UserWarning)
            model.enable_compatibility_mode(disable_warnings=True, no_processing=mode == "compatible")
    return model


@dataclass(frozen=True)
class Form:
    """What distinguishes the families in the forward by hand."""

    norm: str  # "LN", "RMS", or "RMS+1" (whose weight is an offset from 1)
    act: str
    eps: float
    rotary: str | None = None  # the pairs: entries "half" apart, or "adjacent" ones
    rotary_size: int = 0
    base: float = 10000.0
    scale: float | None = None  # of scores; None: 1/sqrt(d_head)
    gated: bool = False
    parallel: bool = False
    one_norm: bool = False  # attention and MLP read the same norm
    after_sublayers: bool = False  # a norm on what is added
    on_stream: bool = False  # norms on the sums, none before attention and MLP
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # of each layer; none: no layer has one
    cap: float | None = None
    last_cap: float | None = None
    causal: bool = True
    first_position: int = 0
    embed_scale: float = 1.0
    transposed: bool = False  # weights of o and the MLP are [in out]

    @classmethod
    def of(cls, model: Any) -> Form:
        config = model.original_model.config
        kind = type(model.original_model).__name__
        rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        turned = {
            "rotary": "half",
            "rotary_size": int(d_head * rope.get("partial_rotary_factor", 1.0)),
            "base": float(rope.get("rope_theta", 10000.0)),
        }
        layers = config.num_hidden_layers
        if kind == "GPT2LMHeadModel":
            return cls("LN", "gelu_new", config.layer_norm_epsilon, transposed=True)
        if kind == "GPTNeoXForCausalLM":
            parallel = config.use_parallel_residual
            return cls("LN", "gelu", config.layer_norm_eps, parallel=parallel, **turned)
        if kind == "PhiForCausalLM":
            return cls("LN", "gelu_new", config.layer_norm_eps, parallel=True, one_norm=True, **turned)
        if kind == "GPTJForCausalLM":
            turned |= {"rotary": "adjacent", "rotary_size": config.rotary_dim}
            return cls("LN", "gelu_new", config.layer_norm_epsilon, parallel=True, one_norm=True, **turned)
        if kind == "OPTForCausalLM":
            return cls("LN", "relu", 1e-5, first_position=2)
        if kind == "BertForMaskedLM":
            return cls("LN", "gelu", config.layer_norm_eps, on_stream=True, causal=False)
        gated: dict[str, Any] = {"eps": config.rms_norm_eps, "gated": True, **turned}
        if kind == "Gemma2ForCausalLM":
            return cls(
                "RMS+1",
                "gelu_new",
                scale=config.query_pre_attn_scalar**-0.5,
                windows=tuple(
                    config.sliding_window if one == "sliding_attention" else None
                    for one in config.layer_types
                ),
                cap=config.attn_logit_softcapping,
                last_cap=config.final_logit_softcapping,
                after_sublayers=True,
                embed_scale=config.hidden_size**0.5,
                **gated,
            )
        windows = {"windows": (config.sliding_window,) * layers} if kind == "MistralForCausalLM" else {}
        return cls("RMS", "silu", qk_norm=kind == "Qwen3ForCausalLM", **windows, **gated)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


def _unchanged(site: str, layer: int | None, value: Tensor) -> Tensor:
    return value


@torch.no_grad()
def forward(
    model: Any,
    tokens: Tensor,
    edit: Callable[[str, int | None, Tensor], Tensor] = _unchanged,
    keep: Tensor | None = None,
) -> Tensor:
    """The logits of a bridge's model, from its parameters and its config alone.

    `edit(site, layer, value)` sees and may replace every site, heads apart. `keep` [batch pos]: False keys are
    seen by nobody, and positions are counted from the first true one.
    """
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    config, form = model.original_model.config, Form.of(model)
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    batch, length = tokens.shape
    order = torch.arange(length).expand(batch, -1)
    if keep is not None:
        order = (keep.long().cumsum(1) - 1).clamp(min=0)

    def norm(x: Tensor, name: str) -> Tensor:
        if form.norm == "LN":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + form.eps)
        gain = weights.get(f"{name}.weight", torch.ones(()))
        x = x * (gain + 1 if form.norm == "RMS+1" else gain)
        return x + weights.get(f"{name}.bias", torch.zeros(()))

    def affine(x: Tensor, name: str, turn: bool = False) -> Tensor:
        weight = weights[f"{name}.weight"]
        return x @ (weight if turn else weight.mT) + weights.get(f"{name}.bias", torch.zeros(()))

    def capped(x: Tensor, cap: float | None) -> Tensor:
        return x if cap is None else cap * torch.tanh(x / cap)

    def rotated(x: Tensor) -> Tensor:
        if form.rotary is None:
            return x
        size = form.rotary_size
        # The models' tables are in single precision.
        frequency = 1.0 / (form.base ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
        angle = order[:, :, None, None].float() * frequency
        cos, sin = angle.cos().double(), angle.sin().double()
        turning, rest = x[..., :size], x[..., size:]
        if form.rotary == "adjacent":
            one, two = turning[..., ::2], turning[..., 1::2]
            turned = torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)
        else:
            one, two = turning.chunk(2, -1)
            turned = torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
        return torch.cat([turned, rest], -1)

    hidden = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    far = torch.arange(length)[:, None] - torch.arange(length)  # query - key
    if form.causal:
        hidden = hidden | (far < 0)
    if keep is not None:
        hidden = hidden | ~keep[:, None, None, :]

    resid = edit("embed", None, weights["embed.weight"][tokens] * form.embed_scale)
    if "pos_embed.weight" in weights:
        rows = weights["pos_embed.weight"][order + form.first_position]
        resid = resid + edit("pos_embed", None, rows)
    if form.on_stream:
        resid = norm(resid + weights["token_type_embed.weight"][0], "embed_ln")
    for layer in range(config.num_hidden_layers):
        path = f"blocks.{layer}"
        resid = start = edit("resid_pre", layer, resid)
        x = resid if form.on_stream else norm(resid, f"{path}.ln1")
        q, k, v = (
            edit(site, layer, affine(x, f"{path}.attn.{site}").unflatten(-1, (count, -1)))
            for site, count in (("q", heads), ("k", key_heads), ("v", key_heads))
        )
        if form.qk_norm:
            q, k = norm(q, f"{path}.attn.q_norm"), norm(k, f"{path}.attn.k_norm")
        q, k = rotated(q), rotated(k)
        k, v = (torch.stack([y[:, :, head * key_heads // heads] for head in range(heads)], 2) for y in (k, v))
        scale = q.shape[-1] ** -0.5 if form.scale is None else form.scale
        scores = capped(torch.einsum("bqhe,bkhe->bhqk", q, k) * scale, form.cap)
        masked, window = hidden, form.windows[layer] if form.windows else None
        if window is not None:
            masked = masked | (far >= window)
        scores = edit("scores", layer, scores.masked_fill(masked, -torch.inf))
        pattern = edit("pattern", layer, scores.softmax(-1).nan_to_num())
        z = edit("z", layer, torch.einsum("bhqk,bkhe->bqhe", pattern, v))
        out = affine(z.flatten(-2), f"{path}.attn.o", form.transposed)
        if form.after_sublayers:
            out = norm(out, f"{path}.ln1_post")
        out = edit("attn_out", layer, out)
        middle = resid + out
        if form.parallel:
            x = x if form.one_norm else norm(start, f"{path}.ln2")
        else:
            middle = edit("resid_mid", layer, middle)
            if form.on_stream:
                middle = norm(middle, f"{path}.ln1")
            x = middle if form.on_stream else norm(middle, f"{path}.ln2")
        act = _ACTIVATIONS[form.act]
        if form.gated:
            pre = edit("mlp_pre", layer, affine(x, f"{path}.mlp.gate"))
            post = act(pre) * affine(x, f"{path}.mlp.in")
        else:
            post = act(edit("mlp_pre", layer, affine(x, f"{path}.mlp.in", form.transposed)))
        out = affine(edit("mlp_post", layer, post), f"{path}.mlp.out", form.transposed)
        if form.after_sublayers:
            out = norm(out, f"{path}.ln2_post")
        resid = edit("resid_post", layer, middle + edit("mlp_out", layer, out))
        if form.on_stream:
            resid = norm(resid, f"{path}.ln2")
    if form.on_stream:
        resid = _ACTIVATIONS[form.act](affine(resid, "mlm_head"))
    return capped(affine(norm(resid, "ln_final"), "unembed"), form.last_cap)


class Models:
    """Bridges by family and settings, each booted once a session. Tests that change one take `fresh=True`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: dict[str, Path] = {}
        self._booted: dict[tuple[str, str, torch.dtype], Any] = {}

    def folder(self, name: str, seed: int = 0, **changes: Any) -> Path:
        key = f"{name}-{seed}-" + "-".join(f"{k}={v}" for k, v in changes.items())
        if key not in self._folders:
            self._folders[key] = save(name, self._folder / str(len(self._folders)), seed, **changes)
        return self._folders[key]

    def __call__(
        self,
        name: str,
        mode: str = "raw",
        dtype: torch.dtype = torch.float64,
        fresh: bool = False,
        **changes: Any,
    ) -> Any:
        if fresh or changes:
            return boot(self.folder(name, **changes), mode, dtype)
        key = (name, mode, dtype)
        if key not in self._booted:
            self._booted[key] = boot(self.folder(name), mode, dtype)
        return self._booted[key]

    def plain(self, name: str) -> Any:
        """The Hugging Face model itself, in float64."""
        auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
        return auto.from_pretrained(self.folder(name), dtype=torch.float64, attn_implementation="eager")
