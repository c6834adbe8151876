"""Prompts of a file as a task, so that experiments measure on them as on any other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from circuits import PromptPairs, read_prompts
from interp_tasks.errors import UserError
from interp_tasks.measurement.option_parsing import PROMPT_METRICS
from tasks.base import Batch, DropMetric, Metric, ProbeTarget, ProbeTargets, Split, Task
from tasks.seeds_and_device_tensors import generator

if TYPE_CHECKING:
    from interp_tasks.checkpoints import ResolvedCheckpoint


class PromptBatch(Batch):
    """Some prompts of a file; its tokens are ``circuits.Prompts``, which carry their padding."""

    pairs: PromptPairs

    def __init__(self, pairs: PromptPairs) -> None:
        own = {"pairs": pairs, "tokens": pairs.tokens, "targets": torch.zeros(len(pairs)), "extras": {}}
        for name, value in own.items():
            object.__setattr__(self, name, value)  # a batch is frozen

    def __getitem__(self, rows: slice | Tensor | list[int]) -> PromptBatch:
        return PromptBatch(self.pairs[rows])

    def to(self, device: str | torch.device) -> PromptBatch:
        """Returns the batch as it is: what runs prompts moves them."""
        return self


class PromptsTask(Task):
    """Tells an answer from a wrong one after each prompt of a file."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    name: ClassVar[str] = "prompts"
    drop_metric: ClassVar[DropMetric] = DropMetric(PROMPT_METRICS[0], "up")
    pairs: PromptPairs

    @property
    def sequence_length(self) -> int:
        return self.pairs.tokens.shape[1]

    @property
    def d_vocab(self) -> int:
        return int(self.pairs.tokens.tokens.max()) + 1

    @property
    def read_positions(self) -> tuple[int, ...]:
        return (-1,)

    @property
    def metric_names(self) -> tuple[str, ...]:
        return PROMPT_METRICS

    def check_model(self, model: Any) -> None:
        """Accepts every model: prompts were read with its own tokenizer."""

    def sample(self, n: int | None, seed: int = 0, split: Split = "test") -> PromptBatch:
        """Returns the prompts in an order of the seed, so that halves are alike; there are none beside them."""
        if split != "test":
            raise UserError("--prompts: classes of heads are found on other examples, which a file has not")
        order = torch.randperm(len(self.pairs), generator=generator(seed, "prompts"))
        return PromptBatch(self.pairs[order[:n].tolist()])

    def patch_sources(self, batch: PromptBatch) -> dict[str, PromptBatch]:
        pairs = batch.pairs
        if pairs.corrupted is None:
            return {}
        return {"corrupted": PromptBatch(PromptPairs(pairs.source, pairs.metric, {}, None))}

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Metric]:
        assert isinstance(batch, PromptBatch)
        difference = batch.pairs.metric(output, batch.pairs.tokens)
        return dict(zip(PROMPT_METRICS, (difference, (difference > 0).to(difference.dtype)), strict=True))

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return -self.metrics(output, batch)[PROMPT_METRICS[0]].mean()  # type: ignore[union-attr]

    def probe_targets(self, batch: Batch) -> ProbeTargets:
        """Returns the labels, read at the last token: numbers, or classes where some are none."""
        assert isinstance(batch, PromptBatch)
        labels = batch.pairs.labels
        return ProbeTargets(
            {name: make_number_or_class_target(values) for name, values in labels.items()}, positions=(-1,)
        )


def make_number_or_class_target(values: tuple[Any, ...]) -> ProbeTarget:
    try:
        return ProbeTarget(torch.tensor([float(value) for value in values]), "regression")
    except (TypeError, ValueError):
        classes = sorted({str(value) for value in values})
        return ProbeTarget(torch.tensor([classes.index(str(value)) for value in values]), "classification")


def prompts_task(file: str | Path, stored: ResolvedCheckpoint) -> PromptsTask:
    """Returns the prompts of a file in the tokens of a checkpoint's model, whose weights are not read for it."""
    from interp_tasks.checkpoints.checkpoint import give_tokenizer, model_from_json

    model = model_from_json(stored.meta["model"], stored.path)
    give_tokenizer(model, stored.run_path)
    return PromptsTask(pairs=read_prompts(model, file))
