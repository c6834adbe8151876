"""A problem of `circuit_quality.py`, and how a ranking of its edges is written; runs beside any TransformerLens."""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

T = TypeVar("T")
#: How often a method is timed, and the seconds above which once is enough.
REPEATS, LONG = 5, 15


def loaded(config: dict[str, Any], weights: dict[str, Tensor], **switches: bool) -> HookedTransformer:
    """Returns a model of whatever TransformerLens is installed, which may know fewer settings than wrote them."""
    # TransformerLens 4 has neither.
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    known = {each.name for each in fields(HookedTransformerConfig)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {name: value for name, value in config.items() if name in known}
        model = HookedTransformer(HookedTransformerConfig(**settings, device="cpu"))
    # Buffers such as masks have other shapes in other versions, and are made anew.
    own = dict(model.named_parameters())
    model.load_state_dict({name: weight for name, weight in weights.items() if name in own}, strict=False)
    for name, value in switches.items():
        getattr(model, f"set_{name}")(value)
    return model.eval()


@dataclass(frozen=True)
class Problem:
    """A model, and prompts with their source and the weight of each logit in the metric, in two halves.

    Attributes:
        tensors: by "found.base", "tested.weight" and so on.
        truth: the edges of the circuit, where it is known.
        groups: how many heads' keys and values there were, where there is now a copy for each head.
    """

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    truth: list[str] | None
    groups: int | None = None

    @classmethod
    def load(cls, folder: Path) -> Problem:
        described = json.loads((folder / "problem.json").read_text())
        weights, tensors = (load_file(folder / f"{name}.safetensors") for name in ("model", "prompts"))
        return cls(folder, described["config"], weights, tensors, described["truth"])

    @staticmethod
    def save(folder: Path, given: Any, halves: dict[str, Tensor]) -> None:
        """Writes the problem of a model, tensors base, source and weight, and the rows of each half."""
        folder.mkdir(parents=True, exist_ok=True)
        config = given.model.cfg
        plain = asdict(config) if is_dataclass(config) else config.to_dict()
        kept = {
            name: value
            for name, value in plain.items()
            if isinstance(value, (int, float, str, list, type(None)))
        }
        kept = {
            name: value for name, value in kept.items() if name not in ("device", "tokenizer_name", "dtype")
        }
        (folder / "problem.json").write_text(json.dumps({"config": kept, "truth": given.truth}, indent=1))
        save_file(
            {name: weight.contiguous().clone() for name, weight in given.model.state_dict().items()},
            folder / "model.safetensors",
        )
        parts = {"base": given.base, "source": given.source, "weight": given.weight}
        tensors = {
            f"{half}.{name}": part[rows].contiguous()
            for half, rows in halves.items()
            for name, part in parts.items()
        }
        save_file(tensors, folder / "prompts.safetensors")

    @property
    def name(self) -> str:
        return self.folder.name.rpartition(".")[0]

    def model(self, **switches: bool) -> HookedTransformer:
        return loaded(self.config, self.weights, **switches)

    def ungrouped(self) -> Problem:
        """Returns the same function with keys and values for each head; names of edges are still those of groups."""
        groups = self.config.get("n_key_value_heads")
        each = self.config["n_heads"] // groups if groups else 1
        weights = {
            name.replace("attn._", "attn."): weight.repeat_interleave(each, 0) if "attn._" in name else weight
            for name, weight in self.weights.items()
        }
        return replace(self, weights=weights, config=self.config | {"n_key_value_heads": None}, groups=groups)

    def with_mlps(self) -> Problem:
        """Returns the same function with MLPs of zeros, where there are none."""
        if not self.config["attn_only"]:
            return self
        width, weights = self.config["d_model"], dict(self.weights)
        for layer in range(self.config["n_layers"]):
            shapes = {"W_in": (width, 1), "b_in": (1,), "W_out": (1, width), "b_out": (width,)}
            weights |= {f"blocks.{layer}.mlp.{name}": torch.zeros(shape) for name, shape in shapes.items()}
        more = {"attn_only": False, "d_mlp": 1, "act_fn": "relu"}
        return replace(self, weights=weights, config=self.config | more)

    def half(self, name: str) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """Returns base, source, and the metric of outputs and the numbers of their rows, for each prompt."""
        base, source, weight = (self.tensors[f"{name}.{part}"] for part in ("base", "source", "weight"))
        return base, source, lambda output, rows: (output * weight[rows]).sum((1, 2))

    def receiver(self, layer: int, head: int, read: str) -> str:
        """Returns the name of what a head reads by: of keys and values that heads share, their group's."""
        groups = self.groups or self.config.get("n_key_value_heads")
        if groups is None or read == "q":
            return f"{layer}.{head}.{read}"
        return f"{layer}.k{head * groups // self.config['n_heads']}.{read}"

    def write(
        self,
        method: str,
        edges: dict[str, float],
        forwards: float,
        seconds: float,
        own: dict[str, Any] | None = None,
    ) -> None:
        """Writes a ranking.

        Args:
            edges: scores by name; the size ranks.
            forwards: passes of all prompts through the model, backward passes apart.
            own: "size" and "value", what the library itself finds for the metric under the first so many, on the
                prompts that are tested.
        """
        described = {"method": method, "forwards": forwards, "seconds": seconds, "own": own, "edges": edges}
        slug = "".join(letter if letter.isalnum() else "-" for letter in method)
        (self.folder / f"ranking.{slug}.json").write_text(json.dumps(described, indent=1))
        print(f"{self.folder.name:<24}{method:<40}{forwards:>9.1f} forwards{seconds:>9.2f} s", flush=True)


def measured(model: torch.nn.Module, rows: int, method: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """Returns what a method finds, and what it spends: `forwards` of so many rows, and `seconds` of the processor.

    The seconds are the median of REPEATS calls, or those of the first where it takes more than LONG. A forward that
    begins in a later block counts as the blocks that it runs.
    """
    forwards, blocks = 0.0, list(model.blocks)
    kind = type(blocks[0])
    forward = kind.forward

    def counted(block: Any, x: Tensor, *others: Any, **named: Any) -> Any:
        nonlocal forwards
        forwards += x.shape[:-2].numel() / rows / len(blocks)
        return forward(block, x, *others, **named)

    seconds = list[float]()
    # Not a hook: hooks of the user's are taken into account, or refused.
    kind.forward = counted
    try:
        while not seconds or (len(seconds) < REPEATS and seconds[0] < LONG):
            begun = time.process_time()
            found = method()
            seconds.append(time.process_time() - begun)
    finally:
        kind.forward = forward
    return found, {"forwards": forwards / len(seconds), "seconds": statistics.median(seconds)}


def each_problem(rank: Callable[[Problem], None]) -> None:
    """Ranks the problems in the folder that the command line names, those of a pattern behind it; errors are shown."""
    torch.set_num_threads(1)
    for path in sorted(Path(sys.argv[1]).glob(sys.argv[2] if len(sys.argv) > 2 else "*.*")):
        try:
            rank(Problem.load(path))
        except Exception as error:
            print(f"{path.name:<24}{type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)


def first(edges: dict[str, float], count: int) -> list[str]:
    """Returns the largest edges."""
    return sorted(edges, key=lambda edge: -abs(edges[edge]))[:count]
