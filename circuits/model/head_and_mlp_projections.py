"""Computes the steps between the residual stream and a head or an MLP, from norms and weights by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS
from circuits.model.supported_models import missing_weights_hint

# Largest difference allowed between a product of weights and the model's own value, relative to the largest entry.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF = 5e-2  # of half precision
_COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The matrices of a bridge that are read here.
_MATRICES = tuple(f".{name}.weight" for name in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.out"))
#: The site that each component's output is a linear function of.
OUTPUTS = {"attn_out": "z", "mlp_out": "mlp_post"}


@dataclass(frozen=True)
class Projections:
    """The norms and weights of one model, as they are at the time of each call; by them path patching follows how a
    difference in the stream changes what heads and MLPs read and write.
    """

    hooked: HookedModel
    tensors: Mapping[str, Tensor]  # its parameters and buffers

    @classmethod
    def of_model(cls, hooked: HookedModel) -> Projections:
        tensors = hooked.model.state_dict(keep_vars=True)
        for name, value in tensors.items():
            if name.endswith(_MATRICES) and (
                value.dtype not in _COMPUTED or value.ndim != 2 or 1 in value.shape
            ):
                dtype = str(value.dtype).removeprefix("torch.")
                raise CircuitsError(
                    f"{name} is packed ({dtype} {list(value.shape)}), as in a quantised model, where paths and direct "
                    "contributions are not supported; load it unquantised, or patch activations"
                )
        return cls(hooked, tensors)

    def attn_input(self, layer: int, streams: Tensor) -> Tensor:
        """Returns what a layer's attention reads of residual streams [row pos d_model]: the streams after its norm."""
        if self.hooked.post_norm or self.hooked.norms_after_only:
            return streams.clone()  # a caller may keep both
        normed: Tensor = self.hooked.block_module(layer).ln1(streams)
        return normed

    def apply_post_norm_after(self, site: str, layer: int | None, stream: Tensor) -> Tensor:
        """Returns the residual stream past a site: normalised in a post-norm model, else the same object."""
        return self._apply_norm(self.hooked.post_norm_path_after(site, layer), stream)

    def apply_sublayer_norm(self, site: str, layer: int, output: Tensor) -> Tensor:
        """Returns what is added to the stream, before the hooks at attn_out or mlp_out: the output of the sublayer's
        weights, normalised where a norm follows them, else the same object.
        """
        return self._apply_norm(self.hooked.sublayer_norm_path(site, layer), output)

    def _apply_norm(self, path: str | None, x: Tensor) -> Tensor:
        normed: Tensor = x if path is None else self.hooked.model.get_submodule(path)(x)
        return normed

    def qkv_weight_and_bias(self, site: str, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the weights of q, k or v [head d_model d_head] and the biases [head d_head]; under grouped-query
        attention those of k and v by key-value group.
        """
        path, heads = f"blocks.{layer}.attn", self.hooked.head_count(KINDS[site])
        if f"{path}.{site}.weight" in self.tensors:
            weight, bias = self.tensors[f"{path}.{site}.weight"], self.tensors.get(f"{path}.{site}.bias")
            bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
            return weight.unflatten(0, (heads, -1)).mT, bias.unflatten(0, (heads, -1))
        parameters = []
        for name in (f"W_{site.upper()}", f"b_{site.upper()}"):
            # Grouped key-value heads are fewer, and stand under another name.
            parameter = self._find_weight_by_names(f"{path}.{name}", f"{path}._{name}")
            parameters.append(
                parameter.repeat_interleave(heads // len(parameter), 0)
                if len(parameter) < heads
                else parameter
            )
        return parameters[0], parameters[1]

    def output_weight_and_bias(self, site: str, layer: int) -> tuple[Tensor, Tensor | None]:
        """Returns the weights from z (heads flattened) or mlp_post to the stream [in d_model], and the bias."""
        path = f"blocks.{layer}.{'attn' if site == 'z' else 'mlp'}"
        name, capital = ("o", "O") if site == "z" else ("out", "out")
        if f"{path}.{name}.weight" in self.tensors:
            weight = self.tensors[f"{path}.{name}.weight"]
            weight = weight if self.hooked.is_weight_input_first(f"{path}.{name}") else weight.mT
            return weight, self.tensors.get(f"{path}.{name}.bias")
        weight = self._find_weight_by_names(f"{path}.W_{capital}")
        return weight.flatten(0, -2), self.tensors.get(f"{path}.b_{capital}")

    def mlp_output(self, layer: int, stream_before_hooks: Tensor, stream_after_hooks: Tensor) -> Tensor:
        """Returns the output of a layer's MLP, which is added to a residual stream, with all hooks inside it.

        Args:
            stream_before_hooks: the stream before the hooks at resid_mid; in a parallel block, at resid_pre.
            stream_after_hooks: the stream after them.
        """
        block = self.hooked.block_module(layer)
        if self.hooked.bridged:
            # The hook point of resid_mid is the norm's own; that of a parallel block's stream is not.
            output: Tensor = block.mlp(
                block.ln2(stream_after_hooks if self.hooked.parallel else stream_before_hooks)
            )
            normed: Tensor = block.ln2_post(output) if hasattr(block, "ln2_post") else output
            return normed
        if getattr(self.hooked.model.cfg, "use_hook_mlp_in", False):
            stream_after_hooks = block.hook_mlp_in(stream_after_hooks)
        reads_stream = self.hooked.post_norm or self.hooked.norms_after_only
        return block.apply_mlp(stream_after_hooks if reads_stream else block.ln2(stream_after_hooks))

    def _find_weight_by_names(self, *names: str) -> Tensor:
        for name in names:
            if name in self.tensors:
                return self.tensors[name]
        raise CircuitsError(
            f"the model has no weight {names[0]}, which paths and direct contributions need"
            f"{missing_weights_hint(self.tensors)}"
        )


def check_recomputed(activation: Tensor, computed: Tensor, label: str, what: str) -> None:
    """Refuses a model whose activation is not the one computed from another site and the weights."""
    with torch.no_grad():
        error, largest = (activation - computed).abs().max(), activation.abs().max()
        # The comparison is negated so that NaN counts as a difference.
        if not bool(error <= _TOLERANCE.get(activation.dtype, _HALF) * largest):
            if not bool(error.isfinite()):
                raise CircuitsError(
                    f"{label}: cannot tell whether {what}: the run has NaN or infinity there, of its own or from the "
                    "source"
                )
            raise CircuitsError(
                f"{label}: {what} by {float(error / largest):.1e} of its largest entry; a hook stands between them, or "
                "the model is not a plain one"
            )
