"""Greedy decoding: a model continues prompts with its most likely tokens."""

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
    """The ``n`` most likely next tokens after each prompt, one after the other, all prompts together.

    Keys and values of what was read are kept, so that each step reads one token.
    """
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    training = model.training
    model.eval()
    try:
        kept = TransformerLensKeyValueCache.init_cache(model.cfg, prompts.device, len(prompts))
        read, answers = prompts, []
        for _ in range(n):
            # Every token is to be seen: without a mask the model would ask a tokenizer for the padding.
            output = model(read, past_kv_cache=kept, attention_mask=torch.ones_like(read))
            read = output[:, -1].argmax(-1, keepdim=True)
            answers.append(read)
        return torch.cat(answers, 1)
    finally:
        model.train(training)
