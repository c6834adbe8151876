"""Makes the problems of `circuit_quality.py`: models, prompts in two halves, sources and metrics.

Modular addition and 7x7 completion as shipped; a two-layer induction model, trained here; the compiled models of
tests/data/known_circuits, in a rotated basis; and a small language model, as docs/tutorials/language-model.md has it.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from alternatives.ranking import Problem
from known_circuits import NAMES, Known
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

from circuits import circuit, read_prompts, run
from interp_tasks import load_checkpoint

SEED = 0
#: Prompts that circuits are found on, and as many that they are tested on.
HALF = 128


class Given(NamedTuple):
    """A model, its prompts and what their answers are weighed by: [n pos], [n pos], [n pos logit]."""

    model: HookedTransformer
    base: Tensor
    source: Tensor
    weight: Tensor
    truth: list[str] | None = None


def right_minus_wrong(right: Tensor, wrong: Tensor, positions: list[int], like: Tensor) -> Tensor:
    """Returns the weights of a mean logit difference at positions; right and wrong are [n position]."""
    weight = torch.zeros_like(like)
    rows, columns = torch.arange(len(like))[:, None], torch.tensor(positions)[None]
    weight[rows, columns, right] += 1 / len(positions)
    weight[rows, columns, wrong] -= 1 / len(positions)
    return weight


def projection(model: HookedTransformer, base: Tensor, source: Tensor, read: Tensor) -> Tensor:
    """Returns the weights of the output along clean − source, at the positions that are read [n pos]."""
    gap = (run(model, base) - run(model, source)) * read[..., None]
    return gap / gap.square().sum((1, 2), keepdim=True).clamp(min=1e-6).sqrt()


def addition() -> Given:
    model = load_checkpoint("zoo:modular-addition-113@post").model
    pairs = torch.randint(113, (2, 512, 2), generator=torch.Generator().manual_seed(SEED))
    base, source = (torch.cat([each, torch.full((512, 1), 113)], 1) for each in pairs)
    differ = (pairs[0].sum(1) - pairs[1].sum(1)) % 113 != 0
    base, source = base[differ], source[differ]
    right, wrong = ((each[:, :2].sum(1) % 113)[:, None] for each in (base, source))
    return Given(model, base, source, right_minus_wrong(right, wrong, [2], run(model, base)))


def completion() -> Given:
    checkpoint = load_checkpoint("zoo:matrix-completion-7x7@post")
    batch = checkpoint.require_task().sample(128, seed=SEED)
    base, source = batch.tokens, batch.tokens.roll(1, 0)
    weight = projection(checkpoint.model, base, source, torch.ones(base.shape))
    return Given(checkpoint.model, base, source, weight)


def repeated(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns tokens [n 24], 5 to 12 random ones over and over, and others with the same periods."""
    generator = torch.Generator().manual_seed(seed)
    period = torch.randint(5, 13, (n, 1), generator=generator)
    words = torch.randint(64, (2, n, 24), generator=generator)
    base, source = words.gather(2, (torch.arange(24) % period).expand(2, -1, -1))
    return base, source


def induction() -> Given:
    sizes = {"n_layers": 2, "n_heads": 4, "d_head": 16, "d_model": 64, "n_ctx": 24, "d_vocab": 64}
    rotary = {"positional_embedding_type": "rotary", "rotary_dim": 16, "normalization_type": None}
    config = HookedTransformerConfig(**sizes, **rotary, attn_only=True, seed=SEED, device="cpu")
    model = HookedTransformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(300):
        each = model(repeated(64, step)[0], return_type="loss", loss_per_token=True)
        optimizer.zero_grad()
        each[:, 12:].mean().backward()
        optimizer.step()
    base, source = repeated(256, 1000)
    right, wrong = base[:, 13:], source[:, 13:]
    return Given(
        model.eval(), base, source, right_minus_wrong(right, wrong, list(range(12, 23)), run(model, base))
    )


def known(name: str) -> Given:
    loaded = Known.load(name, rotated_by=SEED)
    base, source, read = loaded.pairs(128)
    return Given(loaded.model, base, source, projection(loaded.model, base, source, read), list(loaded.truth))


def stories(ref: str) -> Given:
    """The prompts of docs/tutorials/language-model.md of 21 tokens: after a girl "She", after a boy "He"."""
    model = load_checkpoint(ref).model
    answers, text = {"girl": " She", "boy": " He"}, "One day, a little {} {} {}{}"
    verbs = ("saw", "found", "had", "wanted", "liked", "lost", "got", "took", "made")
    things = (
        "a dog",
        "a red ball",
        "a big cake",
        "a toy car",
        "some flowers",
        "a cat",
        "a blue ball",
        "a new toy",
    )
    ends = (
        ".",
        " in the park.",
        " at home.",
        " near the big tree.",
        " on a hot and sunny day.",
        " one day.",
        " at the beach.",
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.csv"
        with file.open("w", newline="") as written:
            rows = csv.writer(written)
            rows.writerow(["clean", "corrupted", "answer", "wrong"])
            for who, *words in product(answers, verbs, things, ends):
                other = next(noun for noun in answers if noun != who)
                rows.writerow(
                    [text.format(who, *words), text.format(other, *words), answers[who], answers[other]]
                )
        pairs = read_prompts(model, file)
    pairs = pairs[torch.nonzero(pairs.tokens.lengths == 21).flatten()]
    base, source = pairs.tokens.tokens[:, :21], pairs.source.tokens[:, :21]  # the rest is padding
    right, wrong = (torch.tensor(ids).reshape(-1, 1) for ids in (pairs.metric.right, pairs.metric.wrong))
    return Given(model, base, source, right_minus_wrong(right, wrong, [20], run(model, base)))


def candidates(model: HookedTransformer) -> list[str]:
    """Returns the edges that can matter: position embeddings are the same in base and source."""
    return [edge for edge in circuit.full(model) if not edge.startswith("pos_embed")]


def prepare(folder: Path, ref: str | None, splits: int) -> None:
    makers = {"addition": addition, "completion": completion, "induction": induction}
    made: dict[str, Callable[[], Given]] = makers | {
        f"known-{name}": lambda name=name: known(name) for name in NAMES
    }
    if ref is not None:
        made["stories"] = lambda: stories(ref)
    for name, make in made.items():
        given = make()
        for split in range(1 if given.truth else splits):
            order = torch.randperm(len(given.base), generator=torch.Generator().manual_seed(split))
            half = len(order) // 2
            rows = {"found": order[:half][:HALF], "tested": order[half:][:HALF]}
            Problem.save(folder / f"{name}.{split}", given, rows)
        print(
            f"{name}: {len(candidates(given.model))} edges, {len(rows['found'])} prompts in each half",
            flush=True,
        )
