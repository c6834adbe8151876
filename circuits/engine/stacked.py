"""Runs many variants in one forward of the model's own blocks, each from the first block that it edits.

One clean pass keeps the residual stream before the blocks where variants start. Variants are stacked on the batch axis,
each with its edits in its own rows, and join the stack at their first block:

    block 0   clean pass only
    block 1   variants 0, 1              (rows of the clean stream, repeated)
    block 2   variants 0, 1, 2, 3
    ...       unembedding of all of them, at the positions that are read
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from circuits.interventions.base import ActivationEdit, ModelRun, Step, WeightEdit
from circuits.interventions.forward_pass import ForwardPass, References, replacement_for
from circuits.model.contexts import interruptible
from circuits.model.edit_state import State, modules_of, state_of
from circuits.model.generation import DecodeStep
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Handle, hooks_on
from circuits.model.prompts import Prompts

#: A user's class says by this attribute, in its body, that its blocks read nothing but the stream and what the model
#: hands to every block, and treat examples independently.
DECLARED = "tokens_enter_by_embeddings_alone"
# Packages whose modules are known to.
_KNOWN = ("torch", "transformer_lens", "abc", "typing", "collections", "builtins")
#: Where a variant starts that edits the embeddings.
_EMBEDDING, _EMBEDDINGS = -1, ("hook_embed", "hook_pos_embed")


class NotStacked(Exception):
    """Why a variant, or every variant of a model, runs by itself with plain hooks, in one line."""


def check_model(surface: HookedModel, prompts: Prompts) -> None:
    """Raises `NotStacked` for a model whose blocks are not known to run on other rows and from a later block on."""
    model = surface.model
    if surface.bridged:
        raise NotStacked("a bridge cannot start at a block")
    if surface.spliced:
        raise NotStacked("an autoencoder is spliced in")
    if getattr(model.cfg, "positional_embedding_type", None) == "shortformer":
        raise NotStacked("positions enter every block")
    if prompts.extra:
        raise NotStacked(f"its inputs have {', '.join(prompts.extra)}")
    if state_of(model).suspended:
        raise NotStacked("a clean pass is under way")
    names = ("_global_forward_hooks", "_global_forward_pre_hooks")
    everywhere = chain.from_iterable(getattr(nn.modules.module, name).values() for name in names)
    # torch's own, such as the FLOP counter's, only look on.
    if not all(str(getattr(hook, "__module__", "")).startswith("torch.utils.") for hook in everywhere):
        raise NotStacked("there are hooks on all modules")
    classes: set[type] = set()
    for module in modules_of(model):
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            name = next(name for name, one in model.named_modules() if one is module)
            what = "a forward of its own" if "forward" in vars(module) else "a hook"
            raise NotStacked(f"there is {what} on {name or 'the model'}")
        classes.add(type(module))
    for base in chain.from_iterable(one.__mro__ for one in classes):
        known = base.__module__.partition(".")[0] in _KNOWN
        if not known and vars(base).get(DECLARED) is not True:
            raise NotStacked(f"its class {base.__name__} is not the library's")


def _block_of(hook: str, surface: HookedModel) -> int:
    """Returns the block from which an edit at a hook differs from the clean run, -1 for the embeddings."""
    if inside := re.match(r"blocks\.(\d+)\.", hook):
        return int(inside[1])
    if hook in _EMBEDDINGS:
        return _EMBEDDING
    if hook.startswith("ln_final."):
        return surface.n_layers
    raise NotStacked(f"{hook} is in no block")


@dataclass
class CleanPass:
    """A run of the model without edits: its inputs, its output, and what enters the blocks where variants start."""

    prompts: Prompts
    output: Tensor
    streams: Mapping[int, Tensor]
    block_arguments: Mapping[str, Tensor]  # what every block gets beside the stream: padding masks


def clean_pass(surface: HookedModel, prompts: Prompts, starts: set[int]) -> CleanPass:
    """Runs the model itself on some examples, and keeps the streams that enter the blocks `starts`, if any."""
    streams: dict[int, Tensor] = {}
    arguments: dict[str, Tensor] = {}

    def enter(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        streams[layer] = args[0]
        arguments.update({name: one for name, one in kwargs.items() if isinstance(one, Tensor)})

    def leave(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        streams[surface.n_layers] = output

    if not starts:
        return CleanPass(prompts, surface.call(prompts), {}, {})

    def hooks() -> Iterator[Handle]:
        for layer in {0, *starts} - {_EMBEDDING, surface.n_layers}:
            yield surface.block_module(layer).register_forward_pre_hook(
                partial(enter, layer), with_kwargs=True
            )
        if surface.n_layers in starts:
            yield surface.block_module(surface.n_layers - 1).register_forward_hook(leave)

    with hooks_on(hooks()):
        output = surface.call(prompts)
    return CleanPass(prompts, output, streams, arguments)


@dataclass
class StackedVariant:
    """One variant of a stack.

    Attributes:
        start: the first block that it runs.
        hooks: those that it edits or reads.
        changed: whether an edit changed an activation: otherwise its output is the clean one, bit for bit.
        unseen: hooks of its edits that have not fired.
    """

    index: int
    start: int
    plan: Sequence[ActivationEdit]
    hooks: set[str]
    changed: bool = False
    unseen: set[str] = field(default_factory=set)
    call: ForwardPass | None = None

    def begin(self, surface: HookedModel, prompts: Prompts, references: References, state: State) -> None:
        """Starts its run."""
        self.changed, self.unseen = False, {write.hook for write in self.plan}
        tokens, given = surface.inputs(prompts)
        real = given["attention_mask"].bool() if prompts.padded else None
        run = ModelRun(given, tokens, DecodeStep(real=real))
        self.call = ForwardPass(surface, references, state, self.plan, runs=[ModelRun(), run])

    def value(self, hook: str, current: Tensor) -> Tensor:
        """Returns an activation of its rows after its edits there, in their order."""
        assert self.call is not None
        self.unseen.discard(hook)
        before = current
        for write in self.plan:
            if write.hook == hook:
                new, selected = replacement_for(write, self.call, current)
                current = torch.where(selected, new, current)
        self.changed = self.changed or (current is not before and not torch.equal(current, before))
        for write in self.plan:
            for name, read in write.replacement.reads(write).items():
                if read == hook:
                    self.call.reads(write)[name] = current
        return current


def stacked_variant(index: int, plan: Sequence[Step], surface: HookedModel) -> StackedVariant:
    """Returns a variant that shares forwards; raises `NotStacked` for one that acts on more than its own rows."""
    edits: list[ActivationEdit] = []
    hooks: set[str] = set()
    for step in plan:
        if not isinstance(step, ActivationEdit):
            raise NotStacked("it edits weights" if isinstance(step, WeightEdit) else "it cuts paths")
        edits.append(step)
        hooks.update((step.hook, *step.replacement.reads(step).values()))
    start = min((_block_of(hook, surface) for hook in hooks), default=surface.n_layers)
    return StackedVariant(index, start, edits, hooks)


def run_stacked(
    surface: HookedModel,
    clean: CleanPass,
    variants: Sequence[StackedVariant],
    columns: Tensor | None = None,
) -> Tensor:
    """Runs variants together, which have begun and come in the order in which they start.

    Returns their outputs, one after the other, [variant * example pos out]; at `columns` only, where these are given.
    Raises `NotStacked` for the function of an edit that runs the model.
    """
    model, together = surface.model, _Stack(variants, len(clean.prompts))
    users: dict[str, list[int]] = {}
    for number, variant in enumerate(variants):
        for hook in variant.hooks:
            users.setdefault(hook, []).append(number)
    starts = [variant.start for variant in variants]
    edges = [*sorted({max(0, start) for start in starts}), None]

    def hooks() -> Iterator[Handle]:
        for hook, numbers in users.items():
            yield surface.on_forward(hook, partial(together.edited, hook, numbers))
        if columns is not None:
            unembed: Any = model.get_submodule("unembed")
            yield unembed.register_forward_pre_hook(lambda module, args: (args[0][:, columns],))

    with hooks_on(hooks()):
        stream: Tensor | None = None
        if embedded := starts.count(_EMBEDDING):
            tokens, given = surface.inputs(clean.prompts.repeated(embedded))
            stream = interruptible(model, tokens, stop_at_layer=0, **given)
        for start, stop in pairwise(edges):
            assert start is not None
            if joining := starts.count(start):
                joined = _repeated(clean.streams[start], joining)
                stream = joined if stream is None else torch.cat([stream, joined])
            assert stream is not None
            count = len(stream) // together.size
            arguments = {name: _repeated(one, count) for name, one in clean.block_arguments.items()}
            stream = interruptible(model, stream, start_at_layer=start, stop_at_layer=stop, **arguments)
    assert stream is not None
    return stream


def _repeated(x: Tensor, count: int) -> Tensor:
    return x if count == 1 else x.repeat(count, *(1,) * (x.ndim - 1))


@dataclass
class _Stack:
    """The variants of a stack, with `size` rows each."""

    variants: Sequence[StackedVariant]
    size: int
    busy: bool = False

    def edited(self, hook: str, numbers: Sequence[int], activation: Tensor) -> Tensor:
        """Returns an activation of the stack, with the edits of these variants in their own rows."""
        if self.busy:
            raise NotStacked("an edit runs the model inside its run")
        if hook in _EMBEDDINGS:
            # Position embeddings may have one row for all examples.
            count = sum(variant.start == _EMBEDDING for variant in self.variants)
            activation = activation.expand(self.size * count, *activation.shape[1:])
        edited = activation.clone(memory_format=torch.contiguous_format)
        self.busy = True
        for number in numbers:
            rows = slice(number * self.size, (number + 1) * self.size)
            edited[rows] = self.variants[number].value(hook, edited[rows])
        self.busy = False
        return edited
