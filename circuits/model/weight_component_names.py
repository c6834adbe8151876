"""Names the components of a model's weights, and the parameters of each. Imports no torch."""

from __future__ import annotations

# Each part of a component: whether it lies in a layer, and the names of its parameters in a state_dict, after
# "blocks.N." if it does. HookedTransformer writes attn.W_Q (attn._W_K where key-value heads are grouped), a bridge
# attn.q.weight. Attention and MLP do not include LayerNorm, as in Gopalani et al. 2024 (section 3.1.2).
PARTS: dict[str, tuple[bool, str]] = {
    "q": (True, r"attn\.(W_Q|b_Q|q\.(weight|bias))"),
    "k": (True, r"attn\.(_?W_K|_?b_K|k\.(weight|bias))"),
    "v": (True, r"attn\.(_?W_V|_?b_V|v\.(weight|bias))"),
    "o": (True, r"attn\.(W_O|b_O|o\.(weight|bias))"),
    "mlp": (True, r"mlp\.(?!ln\.).+"),
    "ln1": (True, r"ln1(_post)?\..+"),
    "ln2": (True, r"ln2(_post)?\..+"),
    "embed": (False, r"embed\..+"),
    "pos_embed": (False, r"pos_embed\..+"),
    "unembed": (False, r"unembed\..+"),
    "ln_embed": (False, r"ln_embed\..+"),
    "ln_final": (False, r"ln_final\..+"),
}

#: Every component that can be named, and its parts.
COMPONENTS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in PARTS},
    "qkv": ("q", "k", "v"),
    "attn": ("q", "k", "v", "o"),
    "ln": ("ln1", "ln2", "ln_embed", "ln_final"),
}
