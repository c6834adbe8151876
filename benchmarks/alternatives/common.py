"""Models, tokens and timing that all libraries are given; imports torch and transformers only."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

WORDS = 200
LAYERS, HEADS, BATCH, LENGTH = 12, 12, 4, 16


def random_model(layers: int = LAYERS, width: int = 768, heads: int = HEADS) -> Any:
    """A random `GPT2LMHeadModel`, by default of the shape of GPT-2 small with 200 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": 32, "vocab_size": WORDS}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    # Wide, so that edits of a small model show.
    config.initializer_range = 0.02 if width > 100 else 0.4
    return GPT2LMHeadModel(config).eval()


def grouped_model() -> Any:
    """A random Llama of two layers, four heads and two key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    other = {"num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **other, bos_token_id=1, eos_token_id=2)).eval()


def other_family() -> Any:
    """A random Bloom of two layers: ALiBi, a norm after the embedding, packed projections."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS}
    return BloomForCausalLM(
        BloomConfig(**sizes, bos_token_id=1, eos_token_id=2, initializer_range=0.4)
    ).eval()


def saved(model: Any) -> str:
    """A new folder with the model and a tokenizer of its words, for libraries that load by name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{each}" for each in range(WORDS - 3))]
    inner = Tokenizer(models.WordLevel({word: each for each, word in enumerate(words)}, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tempfile.mkdtemp()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def pairs(batch: int = BATCH, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Two batches of random tokens, special ones left out."""
    base, source = torch.randint(3, WORDS, (2, batch, length), generator=torch.Generator().manual_seed(0))
    return base, source


def multiples(
    what: str, clean: Callable[[], Any], job: Callable[[], Any], repeats: int, forwards: str = ""
) -> None:
    """Prints what a job takes as a multiple of a clean forward: median of interleaved repeats, with the range.

    Processor time of one thread, since the machine may be shared. The job itself is not warmed up: it is long.
    """
    clean()
    ratios, cleans = [], []
    for _ in range(repeats):
        spent = []
        for each in (clean, job, clean):
            begun = time.process_time()
            each()
            spent.append(time.process_time() - begun)
        cleans.append((spent[0] + spent[2]) / 2)
        ratios.append(spent[1] / cleans[-1])
    middle, clean_ms = statistics.median(ratios), 1e3 * statistics.median(cleans)
    print(
        f"{what}: {middle:.1f} clean forwards ({min(ratios):.1f} to {max(ratios):.1f}; "
        f"a clean one {clean_ms:.0f} ms{forwards})",
        flush=True,
    )


def tried(question: str, answer: Callable[[], Any]) -> None:
    """Prints what an answer returns, or the error that it ends in."""
    try:
        told = answer()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    print(f"{question}: {' '.join(str(told).split())[:400]}", flush=True)


def start() -> int:
    """One thread, no warnings; returns the repeats, the first argument (default 5; 0: no timing)."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return int(sys.argv[1]) if len(sys.argv) > 1 else 5


def mentions(package: Any, *patterns: str) -> str:
    """Which of the patterns stand in a package's source, and in how many files."""
    import re
    from pathlib import Path

    texts = [path.read_text(errors="replace") for path in Path(next(iter(package.__path__))).rglob("*.py")]
    counts = {
        each: sum(re.search(each, text, re.IGNORECASE) is not None for text in texts) for each in patterns
    }
    return f"{len(texts)} files, " + ", ".join(f"{each!r} in {count}" for each, count in counts.items())


STATISTICS = (r"bootstrap", r"p_?-?values?\b", r"confidence.?interval", r"holm|bonferroni")
SPARSE = (r"sparse.?autoencoder|\bSAEs?\b", r"path.?patch", r"faithful", r"\bDAS\b|distributed alignment")
