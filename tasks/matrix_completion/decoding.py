"""Greedy decoding: continues prompts with a model's most likely tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


@torch.no_grad()
def greedy(
    model: HookedTransformer, prompts: Int[Tensor, "batch pos"], n: int
) -> Int[Tensor, "batch continuation"]:
    """Returns the ``n`` tokens that greedy decoding appends to each prompt, all prompts together.

    Keys and values are cached, so that each step reads one token.
    """
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    training = model.training
    model.eval()
    try:
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, prompts.device, len(prompts))
        read, answers = prompts, []
        for _ in range(n):
            # A mask of ones, as without a mask the model would ask a tokenizer for the padding.
            output = model(read, past_kv_cache=cache, attention_mask=torch.ones_like(read))
            read = output[:, -1].argmax(-1, keepdim=True)
            answers.append(read)
        return torch.cat(answers, 1)
    finally:
        model.train(training)
