"""Checkpoints that are the source of weights or activations, of the architecture of those examined."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints import ResolvedCheckpoint, resolve
from interp_tasks.errors import UserError
from interp_tasks.measurement.subjects import LabelledRef, ResolvedRefs

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


SourceCheckpoint = LabelledRef


def source_checkpoint(source: str) -> LabelledRef:
    """Returns the one checkpoint that ``--source`` names, without loading it.

    Raises:
        UserError: where it names none or several.
    """
    found = resolve_source(source)
    if len(found) > 1:
        raise UserError(
            f"--source {source} names {len(found)} checkpoints, from {found[0].ref} to {found[-1].ref}: name one"
        )
    return LabelledRef(source, found[0])


def source_checkpoints(source: str | Sequence[str]) -> list[LabelledRef]:
    """Returns all checkpoints that ``--source`` names, each once, labelled as those of ``--ckpt`` are.

    Raises:
        UserError: where it names none.
    """
    given = [source] if isinstance(source, str) else list(source)
    found: dict[Path, LabelledRef] = {}
    for each in given or [""]:
        checkpoints = resolve_source(each)
        for checkpoint in checkpoints:
            label = each if len(checkpoints) == 1 else checkpoint.ref
            found.setdefault(checkpoint.path, LabelledRef(label, checkpoint))
    return list(found.values())


def resolve_source(source: str) -> list[ResolvedCheckpoint]:
    if not source.strip():
        raise UserError("no source: give --source, such as zoo:matrix-completion-7x7@post or RUN@last")
    return resolve(source)


def check_architecture(sources: Sequence[LabelledRef], refs: ResolvedRefs) -> None:
    """Refuses sources that are not of the architecture of every REF."""
    receivers = [(named.label, named.resolved.meta["model"]) for named in refs.named]
    for one in sources:
        source_sizes = one.resolved.meta["model"]
        for label, receiver_sizes in receivers:
            for field in sorted({*receiver_sizes, *source_sizes} - NOT_ARCHITECTURE):
                if receiver_sizes.get(field) != source_sizes.get(field):
                    raise UserError(
                        f"--source {one.label} is of another architecture than {label}: its {field} is "
                        f"{shown(source_sizes, field)}, not {shown(receiver_sizes, field)}"
                    )


def shown(model: dict[str, Any], field: str) -> str:
    return str(model.get(field, "not given"))
