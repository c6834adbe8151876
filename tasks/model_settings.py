"""The architecture settings that every task has, and one-line messages about wrong settings."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator

from tasks.errors import did_you_mean


def list_valued_fields(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the fields of a pydantic model that are lists or tuples, or may be."""
    return tuple(name for name, field in model.model_fields.items() if _is_list(field.annotation))


def _is_list(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(map(_is_list, get_args(annotation)))
    return (origin or annotation) in (list, tuple)


#: Larger sizes are taken for typing errors.
MAX_SIZE = 1_000_000
SIZES = ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "n_ctx")


class ModelSettings(BaseModel):
    """A pre-norm, post-norm or norm-free transformer, as a ``HookedTransformer``.

    Attributes:
        d_head: width of a head; ``None`` means d_model / n_heads.
        d_mlp: neurons per layer; ``None`` means 4 · d_model.
        n_ctx: rows of the position table; ``None`` means the task's sequence length. It may exceed it.
        act_fn: ``"gelu"`` is the exact one, ``"gelu_new"`` its tanh form, as in GPT-2.
        normalization: ``"LN"``, or ``None`` for no LayerNorm at all.
        norm: where LayerNorms stand. ``"pre"``: before attention, MLP and unembedding, eps 1e-5. ``"post"``, as in
            BERT: after the embeddings and after each residual sum, none at the end, eps 1e-12.
        biases: which biases train. The others are zero and frozen (``HookedTransformer`` always has them).
        init: ``"normal"``: N(0, init_std) for every matrix; ``"gpt2"``: the same, but W_O and W_out, which write to the
            residual stream, N(0, init_std² / (2 n_layers)); ``"nanda"``: N(0, 1/d_model), unembedding
            N(0, 1/d_vocab_out) (Nanda et al. 2023, code); ``"he"``: truncated normal of variance 2 / fan_in
            with the fan rules of JAX (Syrkis & Søgaard 2024, code); ``"torch"``: as torch's own modules begin
            (Lee et al. 2024, code): embeddings N(0, 1), the input maps of attention Xavier-uniform, all other
            matrices and the biases of the MLP uniform within 1/√fan_in. Other biases start at 0, LayerNorms at (1, 0).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    n_layers: int = Field(1, ge=1)
    n_heads: int = Field(4, ge=1)
    d_model: int = Field(128, ge=1)
    d_head: int | None = Field(None, ge=1)
    d_mlp: int | None = Field(None, ge=1)
    n_ctx: int | None = Field(None, ge=1)
    attn_only: bool = False
    act_fn: Literal["relu", "gelu", "gelu_new", "silu"] = "gelu"
    normalization: Literal["LN"] | None = "LN"
    norm: Literal["pre", "post"] = "pre"
    attention: Literal["bidirectional", "causal"] = "causal"
    biases: Literal["trained", "mlp", "frozen"] = "trained"
    init: Literal["normal", "gpt2", "nanda", "he", "torch"] = "normal"
    init_std: float = Field(0.02, gt=0)

    @model_validator(mode="after")
    def _check_sizes_and_norm(self) -> ModelSettings:
        for name in SIZES:
            if (getattr(self, name) or 0) > MAX_SIZE:
                raise ValueError(f"{name} is at most {MAX_SIZE:,}")
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"d_model = {self.d_model} does not divide into {self.n_heads} heads; "
                "set d_head or change one"
            )
        if self.norm == "post" and self.normalization is None:
            raise ValueError(
                "norm = post is a LayerNorm after each sum: set normalization = LN, or norm = pre"
            )
        return self

    @model_serializer(mode="wrap")
    def _drop_default_norm(self, dump: Callable[[ModelSettings], dict[str, Any]]) -> dict[str, Any]:
        # Runs and checkpoints are compared and named by their settings; older ones lack the setting `norm`.
        dumped = dump(self)
        if self.norm == "pre":
            dumped.pop("norm", None)
        return dumped


#: Largest number of characters shown of a value, and of a list of keys.
SHOWN, LISTED = 80, 150


def validation_error_line(
    error: ValidationError,
    section: str,
    valid: Iterable[str],
    inner: Mapping[str, Iterable[str]] | None = None,
) -> str:
    """Returns the complaints of an error, each headed by the key a user would type, joined by semicolons.

    Args:
        valid: the section's keys.
        inner: by key of the section, the keys nested under it.
    """
    complaints = []
    for complaint in error.errors():
        key = ".".join([section, *map(str, complaint["loc"])])
        if complaint["type"] == "extra_forbidden":
            first, *rest = map(str, complaint["loc"])
            parent, last = key.rpartition(".")[::2]
            known = (inner or {}).get(first, ()) if rest else valid
            complaints.append(unknown_key_message(parent, last, known) if known else f"no setting {key}")
            continue
        message = complaint["msg"].removeprefix("Value error, ")
        shown = f", got {shortened_repr(complaint['input'])}" if complaint["loc"] else ""
        complaints.append(f"{key}: {message[:1].lower()}{message[1:]}{shown}")
    return "; ".join(complaints)


def shortened_repr(value: object) -> str:
    """Returns a value's repr, or the two ends of a long one."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 28]}...{text[-25:]}"


def unknown_key_message(section: str, key: str, valid: Iterable[str]) -> str:
    """Returns the message about a key that a section does not have: the closest key, and all keys."""
    keys = list(valid)
    hint = did_you_mean(key, keys, f"{section}.")
    listed = ", ".join(keys)
    if len(listed) > LISTED:
        listed = f"{listed[: listed.rindex(', ', 0, LISTED)]} and others, {len(keys)} in all"
    return f"no setting {section}.{key}: {hint}{section} has {listed}"
