"""Checkpoints that lend weights or activations, of the architecture of those examined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import ResolvedCheckpoint, resolve
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.errors import UserError
from interp_tasks.measurement.subjects import References

if TYPE_CHECKING:
    from interp_tasks.checkpoints import Checkpoint

#: Fields of a model's config that say how it came about, not what it computes.
NOT_ARCHITECTURE = {
    *(
        "seed",
        "init_mode",
        "init_weights",
        "initializer_range",
        "dtype",
        "model_name",
        "original_architecture",
    ),
    *("from_checkpoint", "checkpoint_index", "checkpoint_label_type", "checkpoint_value", "train_seq_length"),
    *("tokenizer_name", "tokenizer_prepends_bos", "default_prepend_bos", "trust_remote_code"),
    *("load_in_4bit", "quantization_method", "layer_norm_folding", "decoder_start_token_id"),
    *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in", "use_hook_tokens"),
}


@dataclass(frozen=True)
class Donor:
    """A checkpoint that lends weights or activations, with the name that the user gave it."""

    label: str
    resolved: ResolvedCheckpoint

    def load(self, device: str) -> Checkpoint:
        from interp_tasks.checkpoints.load import load_resolved

        return load_resolved(self.resolved, device)

    def __str__(self) -> str:
        return self.label if self.resolved.run_path is None else f"{self.label} (step {self.resolved.step})"


def donor_of(source: str) -> Donor:
    """Returns the one checkpoint that ``--source`` names, without loading it.

    Raises:
        UserError: where it names none or several.
    """
    donors = resolve_source(source)
    if len(donors) > 1:
        raise UserError(
            f"--source {source} names {len(donors)} checkpoints, from {donors[0].ref} to {donors[-1].ref}: name one"
        )
    return Donor(source, donors[0])


def donors_of(source: str | Sequence[str]) -> list[Donor]:
    """Returns all checkpoints that ``--source`` names, each once, labelled as those of ``--ckpt`` are.

    Raises:
        UserError: where it names none.
    """
    given = [source] if isinstance(source, str) else list(source)
    donors: dict[Path, Donor] = {}
    for each in given or [""]:
        checkpoints = resolve_source(each)
        for checkpoint in checkpoints:
            label = each if len(checkpoints) == 1 else checkpoint.ref
            donors.setdefault(checkpoint.path, Donor(label, checkpoint))
    return list(donors.values())


def resolve_source(source: str) -> list[ResolvedCheckpoint]:
    if not source.strip():
        raise UserError("no source: give --source, such as zoo:matrix-completion-7x7@post or RUN@last")
    return resolve(source)


def check_architecture(donors: Sequence[Donor], refs: References) -> None:
    """Refuses lenders that are not of the architecture of every REF."""
    receivers = [(named.label, read_meta(named.resolved.path)["model"]) for named in refs.named]
    for donor in donors:
        donor_sizes = read_meta(donor.resolved.path)["model"]
        for label, receiver_sizes in receivers:
            for field in sorted({*receiver_sizes, *donor_sizes} - NOT_ARCHITECTURE):
                if receiver_sizes.get(field) != donor_sizes.get(field):
                    raise UserError(
                        f"--source {donor.label} is of another architecture than {label}: its {field} is "
                        f"{shown(donor_sizes, field)}, not {shown(receiver_sizes, field)}"
                    )


def shown(model: dict[str, Any], field: str) -> str:
    return str(model.get(field, "not given"))
