"""Matrix completion as language modelling: the masked matrix, SEP, then the full one, token by token.

Gopalani, Lubana, Hu 2024, section 3.8 and appendix G. There the drop is learning to copy the observed entries, and
hidden entries are not inferred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tasks.base import Batch, DropMetric, Metric, ProbeTarget, ProbeTargets
from tasks.matrix_completion.attention_templates import Templates, autoregressive_templates
from tasks.matrix_completion.matrix_task_base import MASK_ID, MatrixTask, sum_count_by_mask
from tasks.model_settings import ModelSettings
from tasks.registry import built_in_presets, register
from tasks.seeds_and_device_tensors import constant

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

#: Ids between the last value and SEP that nothing uses: at the published grid [-2, 2] SEP is 404, as in the code.
UNUSED_IDS = 2


class AutoregressiveModelSettings(ModelSettings):
    """Defaults are the pre-LN decoder of the paper: 2 layers, 2 heads, width 256."""

    n_layers: int = Field(2, ge=1)
    n_heads: int = Field(2, ge=1)
    d_model: int = Field(256, ge=1)


@register("matrix-completion-autoregressive")
class AutoregressiveCompletion(MatrixTask):
    """Predicts the next token of [masked entries, SEP, full entries]; the last entry is predicted, never an input.

    With k = n·m entries, position k holds SEP and predicts full entry 0; position k + e predicts entry e.

    Attributes:
        loss_on: ``"sequence"``: cross-entropy of every next token, the masked half, which cannot be predicted,
            included (published); ``"answer"``: of the full entries alone.
    """

    Model: ClassVar[type[ModelSettings]] = AutoregressiveModelSettings
    presets = built_in_presets("matrix-completion-autoregressive")
    published_steps: ClassVar[tuple[int, ...]] = (200, 600)
    drop_metric: ClassVar[DropMetric] = DropMetric("accuracy_observed", "up")
    capturable: ClassVar[bool] = True

    grid_max: float = Field(2.0, gt=0)
    loss_on: Literal["sequence", "answer"] = "sequence"

    @property
    def n_entries(self) -> int:
        return self.n * self.columns

    @property
    def sequence_length(self) -> int:
        return 2 * self.n_entries

    @property
    def separator_id(self) -> int:
        return 2 * self.n_positive_values + 2 + UNUSED_IDS

    @property
    def d_vocab(self) -> int:
        return self.separator_id + 1

    @property
    def read_positions(self) -> tuple[int, ...]:
        """The positions that the loss reads: all, or those from SEP on."""
        return tuple(range(0 if self.loss_on == "sequence" else self.n_entries, self.sequence_length))

    def batch(self, values: Float[Tensor, "batch entry"], hidden: Bool[Tensor, "batch entry"]) -> Batch:
        """Makes a batch from matrices of your own (row-major) and a mask: values are rounded to the grid first.

        Targets: the next token at every position. Extras: ``hidden [batch entry]``.
        """
        ids = self.encode(values)
        separator = torch.full_like(ids[:, :1], self.separator_id)
        sequence = torch.cat([ids.masked_fill(hidden, MASK_ID), separator, ids], 1)
        return Batch(sequence[:, :-1], sequence[:, 1:], {"hidden": hidden})

    def decode(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Returns the values of token ids (float32); MASK, SEP and unused ids have none and give NaN."""
        return super().decode(ids).masked_fill(ids > 2 * self.n_positive_values + 1, float("nan"))

    def loss(self, output: Float[Tensor, "batch _ vocab"], batch: Batch) -> Float[Tensor, ""]:
        """Returns the mean cross-entropy of the next token over the positions that ``loss_on`` names, in nats."""
        targets = batch.targets[:, constant(self.read_positions, torch.long, output.device)]
        return F.cross_entropy(self.read(output).flatten(0, 1), targets.flatten())

    def metrics(self, output: Float[Tensor, "batch _ vocab"], batch: Batch) -> dict[str, Metric]:
        """Returns the metrics of the full entries, each predicted from the true ones before it (teacher forcing).

        ``loss_answer [batch]``: cross-entropy. ``accuracy_observed``, ``accuracy_hidden``: exact tokens, as (sum,
        count) pairs over entries. ``size_hidden``: right but for the sign; ``sign_hidden``: share of those, without
        zeros, with the right sign. ``mse_masked``, ``mse_observed``: pairs, for the mean of the predicted
        distribution over values, to be compared with matrix completion's.
        """
        logits = output[:, -self.n_entries :]
        targets = batch.targets[:, -self.n_entries :]
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        values = torch.arange(1, 2 * self.n_positive_values + 2, device=logits.device)
        mean = wide[..., values].softmax(-1) @ self.decode(values).to(wide.dtype)
        return {
            "loss_answer": F.cross_entropy(wide.mT, targets, reduction="none").mean(1),
            **self._accuracies(logits.argmax(-1), batch),
            **self._squared_errors(mean, batch),
        }

    def decoded(self, model: HookedTransformer, batch: Batch) -> dict[str, Metric]:
        """Returns the metrics of tokens and values under greedy decoding.

        Each entry is predicted from the model's own answers before it; a token that is no value counts as 0.
        """
        answers = greedy_decode(model, batch.tokens[:, : self.n_entries + 1], self.n_entries)
        return {
            **self._accuracies(answers, batch),
            **self._squared_errors(self.decode(answers).nan_to_num(0.0), batch),
        }

    def probe_targets(self, batch: Batch) -> ProbeTargets:
        """Returns ``next_element``, which each position from SEP on predicts; splits ``hidden``, ``observed``."""
        masked_half, hidden = (self.n_entries, 0), batch.extras["hidden"]
        values = F.pad(self._flattened_full_matrices(batch), masked_half)
        splits = {"hidden": F.pad(hidden, masked_half), "observed": F.pad(~hidden, masked_half)}
        positions = tuple(range(self.n_entries, self.sequence_length))
        return ProbeTargets({"next_element": ProbeTarget(values, "regression")}, splits, positions)

    def attention_templates(self) -> Templates:
        """Returns templates of what a head may attend to; see :func:`autoregressive_templates`."""
        return autoregressive_templates(self.n, self.columns)

    def _flattened_full_matrices(self, batch: Batch) -> Float[Tensor, "batch entry"]:
        return self.decode(batch.targets[:, -self.n_entries :])

    def _accuracies(self, ids: Int[Tensor, "batch entry"], batch: Batch) -> dict[str, Metric]:
        truth, hidden = batch.targets[:, -self.n_entries :], batch.extras["hidden"]
        # Token ids are linear in the value, so those of v and −v lie symmetrically around that of 0.
        zero = self.n_positive_values + 1
        right, size = ids == truth, (ids - zero).abs() == (truth - zero).abs()
        signed = hidden & size & (truth != zero)
        of_hidden, of_observed = sum_count_by_mask(right, hidden)
        return {
            "accuracy_observed": of_observed,
            "accuracy_hidden": of_hidden,
            "size_hidden": sum_count_by_mask(size, hidden)[0],
            "sign_hidden": ((right & signed).sum(1), signed.sum(1)),
        }

    def _squared_errors(self, values: Float[Tensor, "batch entry"], batch: Batch) -> dict[str, Metric]:
        error = (values - self._flattened_full_matrices(batch)).square()
        masked, observed = sum_count_by_mask(error, batch.extras["hidden"])
        return {"mse_masked": masked, "mse_observed": observed}


@torch.no_grad()
def greedy_decode(
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
