"""Runs many variants in one forward of the model's own blocks, each from the first block that it edits.

One clean pass keeps the residual stream before the blocks where variants start. Variants are stacked on the batch axis,
each with its edits in its own rows, and join the stack at their first block:

    block 0   clean pass only
    block 1   variants 0, 1              (rows of the clean stream, repeated)
    block 2   variants 0, 1, 2, 3
    ...       unembedding of all of them, at the positions that are read

In their first block, variants that edit nothing before z have no rows in its attention: they join at z.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, Intervention, ModelRun, PassRequest, Step, WeightEdit
from circuits.interventions.clean_passes_and_edit_hooks import (
    assert_functions_keep_weights,
    replacement_and_mask,
)
from circuits.model.edit_state import EditState, get_edit_state, list_modules, mark_running_rows
from circuits.model.generation_positions import DecodeStep
from circuits.model.hooked_model import INSIDE, HookedModel
from circuits.model.hooks import keep_hooks_on
from circuits.model.prompts_with_mask import Prompts
from circuits.model.sites import KINDS

#: A user's class says by this attribute, in its body, that its blocks read nothing but the stream and what the model
#: hands to every block, and treat examples independently.
DECLARED = "tokens_enter_by_embeddings_alone"
# Packages whose modules are known to.
_KNOWN = ("torch", "transformer_lens", "abc", "typing", "collections", "builtins")
#: Where a variant starts that edits the embeddings.
_EMBEDDING, _EMBEDDINGS = -1, ("hook_embed", "hook_pos_embed")
_Z = KINDS["z"].hook
#: The sites of a block that come from z on.
_FROM_Z = ("z", "attn_out", "resid_mid", "mlp_pre", "mlp_post", "mlp_out", "resid_post")


def reason_not_to_stack(hooked: HookedModel, prompts: Prompts) -> str | None:
    """Says why every variant runs by itself with plain hooks: the blocks of the model are not known to run on other
    rows and from a later block on. None where they are.
    """
    model = hooked.model
    if hooked.bridged:
        return "a bridge cannot start at a block"
    if hooked.spliced:
        return "an autoencoder is spliced in"
    if getattr(model.cfg, "positional_embedding_type", None) == "shortformer":
        return "positions enter every block"
    if prompts.extra:
        return f"its inputs have {', '.join(prompts.extra)}"
    if get_edit_state(model).suspended:
        return "a clean pass is under way"
    names = ("_global_forward_hooks", "_global_forward_pre_hooks")
    everywhere = chain.from_iterable(getattr(nn.modules.module, name).values() for name in names)
    # torch's own, such as the FLOP counter's, only look on.
    if not all(str(getattr(hook, "__module__", "")).startswith("torch.utils.") for hook in everywhere):
        return "there are hooks on all modules"
    classes: set[type] = set()
    for module in list_modules(model):
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            name = next(name for name, one in model.named_modules() if one is module)
            what = "a forward of its own" if "forward" in vars(module) else "a hook"
            return f"there is {what} on {name or 'the model'}"
        classes.add(type(module))
    for base in chain.from_iterable(one.__mro__ for one in classes):
        known = base.__module__.partition(".")[0] in _KNOWN
        if not known and vars(base).get(DECLARED) is not True:
            return f"its class {base.__name__} is not the library's"
    return None


@dataclass
class Variant:
    """One variant of a sweep, or one draw of it, planned on a model.

    Attributes:
        alone: why it runs by itself, with plain hooks; None: it shares forwards.
        start: the first block that it runs then; −1: it edits the embeddings.
        from_z: whether it runs that block from z on.
        hooks: those that it edits or reads.
        edits: its steps, where all are edits of activations.
        changed: whether an edit changed an activation in the latest run: otherwise its output is the clean one, bit for
            bit.
        unseen: hooks of its edits that have not fired in the latest run.
    """

    name: str
    draw: int | None
    interventions: tuple[Intervention, ...]
    plan: tuple[Step, ...]
    alone: str | None = None
    start: int = 0
    from_z: bool = False
    hooks: set[str] = field(default_factory=set)
    edits: list[ActivationEdit] = field(default_factory=list)
    changed: bool = False
    unseen: set[str] = field(default_factory=set)

    def decide_stacking(self, hooked: HookedModel) -> None:
        """Finds the block from which it runs with others; `alone` says why it cannot, as it acts on more than its own
        rows.
        """
        for step in self.plan:
            if not isinstance(step, ActivationEdit):
                self.alone = "it edits weights" if isinstance(step, WeightEdit) else "it cuts paths"
                return
            self.edits.append(step)
            self.hooks.update((step.hook, *step.replacement.hooks_read(step).values()))
        blocks = []
        for hook in self.hooks:
            if inside := re.match(r"blocks\.(\d+)\.", hook):
                blocks.append(int(inside[1]))
            elif hook in _EMBEDDINGS:
                blocks.append(_EMBEDDING)
            elif not hook.startswith("ln_final."):
                self.alone = f"{hook} is in no block"
        self.start = min(blocks, default=hooked.n_layers - 1)
        late = {KINDS[site].hook.format(self.start) for site in _FROM_Z}
        early = (hook for hook in self.hooks if hook.startswith(f"blocks.{self.start}."))
        self.from_z = self.start != _EMBEDDING and late.issuperset(early)


@dataclass(kw_only=True)
class CleanPass(ModelRun):
    """A run of the model without edits, from which variants go on.

    Attributes:
        streams: what enters the blocks where variants start.
        z: that of the blocks in which variants start there, by hook.
        block_arguments: what every block gets with the stream: padding masks.
    """

    prompts: Prompts
    output: Any = None
    streams: dict[int, Tensor] = field(default_factory=dict)
    z: dict[str, Tensor] = field(default_factory=dict)
    block_arguments: dict[str, Tensor] = field(default_factory=dict)


def run_clean_pass(
    hooked: HookedModel,
    prompts: Prompts,
    rows: slice,
    variants: Sequence[Variant],
    references: Mapping[PassRequest, Tensor],
) -> CleanPass:
    """Runs the model itself on some rows, and keeps what the variants start from.

    Args:
        references: the results of the clean passes that the variants need, which may come after this one.
    """
    chunk, total = prompts[rows], len(prompts)
    tokens, given = hooked.tokens_and_arguments(chunk)
    step = DecodeStep(real=given["attention_mask"].bool() if chunk.padded else None)
    state = EditState(rows=rows, total=total)
    clean = CleanPass(references, state, hooked.causal, given, tokens, step, prompts=chunk)

    def record_block_input(
        layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        clean.streams[layer] = args[0]
        clean.block_arguments.update({name: one for name, one in kwargs.items() if isinstance(one, Tensor)})

    # The arguments of blocks are those of the first one.
    layers = {0, *(one.start for one in variants)} - {_EMBEDDING} if variants else set()
    at_z = {_Z.format(one.start) for one in variants if one.from_z}
    blocks = (
        hooked.block_modules[layer].register_forward_pre_hook(
            partial(record_block_input, layer), with_kwargs=True
        )
        for layer in layers
    )
    zs = (hooked.on_forward(hook, partial(clean.z.__setitem__, hook)) for hook in at_z)
    with keep_hooks_on(hooked.model, chain(blocks, zs)), mark_running_rows(hooked.model, rows, total):
        clean.output = hooked.run_forward(chunk)
    return clean


def run_stacked(
    hooked: HookedModel, clean: CleanPass, variants: Sequence[Variant], columns: Tensor | None = None
) -> Tensor:
    """Runs variants together, which come in the order in which they start, those that start at a z last.

    Returns their outputs, one after the other, [variant * example pos out]; at `columns` only, where these are given.
    Raises `CircuitsError` for the function of an edit that runs the model.
    """
    model, size, busy = hooked.model, len(clean.prompts), False
    starts = [variant.start for variant in variants]
    embedded = starts.count(_EMBEDDING)
    # By hook, the numbers of the variants that join at a z.
    at_z: dict[str, list[int]] = {}
    for number, variant in enumerate(variants):
        variant.changed, variant.unseen = False, {step.hook for step in variant.edits}
        if variant.from_z:
            at_z.setdefault(_Z.format(variant.start), []).append(number)

    def edit_stacked(hook: str, stack: Tensor) -> Tensor:
        """Returns an activation of the stack, with the edits of each variant in its own rows."""
        nonlocal busy
        if busy:
            raise CircuitsError(INSIDE)
        # Position embeddings may have one row for all examples.
        stack = stack.expand(size * embedded, *stack.shape[1:]) if hook in _EMBEDDINGS else stack
        pieces = list(stack.split(size))
        if joining := at_z.get(hook):
            pieces[joining[0] :] = [clean.z[hook]] * len(joining)
        busy = True
        for number, variant in enumerate(variants):
            if hook in variant.hooks:
                pieces[number] = _apply_variant_edits(clean, variant, hook, pieces[number])
        busy = False
        return torch.cat(pieces)

    hooks = dict.fromkeys(chain(at_z, *(variant.hooks for variant in variants)))
    attentions = (
        model.get_submodule(hook.removesuffix(".hook_z")).register_forward_pre_hook(
            partial(_take_first_rows, joining[0] * size, (joining[-1] + 1) * size), with_kwargs=True
        )
        for hook, joining in at_z.items()
    )
    edits = (hooked.on_forward(hook, partial(edit_stacked, hook)) for hook in hooks)
    writes = (write for variant in variants for write in variant.edits)
    with assert_functions_keep_weights(hooked, writes), keep_hooks_on(model, chain(attentions, edits)):
        stream: Tensor | None = None
        if embedded:
            tokens, given = hooked.tokens_and_arguments(clean.prompts.repeated(embedded))
            stream = model(tokens, stop_at_layer=0, **given)
        for start, stop in pairwise([*sorted({max(0, start) for start in starts}), hooked.n_layers]):
            joined = [clean.streams[start]] * starts.count(start)
            stream = torch.cat(joined if stream is None else [stream, *joined])
            copies = len(stream) // size
            arguments = {name: torch.cat([one] * copies) for name, one in clean.block_arguments.items()}
            stream = model(stream, start_at_layer=start, stop_at_layer=stop, **arguments)
        assert stream is not None
        # Edits at the last norm count all positions.
        cut = columns is not None and not any(hook.startswith("ln_final.") for hook in hooks)
        output: Tensor = model(stream[:, columns] if cut else stream, start_at_layer=hooked.n_layers)
    return output if columns is None or cut else output[:, columns]


def _take_first_rows(
    count: int, total: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leaves all rows but the first out of the arguments of a module that have `total` rows, as a hook before it; one
    stays at least, as not every module can run on none.
    """
    given = dict(kwargs)
    for name, x in kwargs.items():
        if isinstance(x, Tensor) and x.shape[:1] == (total,):
            given[name] = x[: max(1, count)]
    return args, given


def _apply_variant_edits(clean: CleanPass, variant: Variant, hook: str, before: Tensor) -> Tensor:
    """Returns an activation in a variant's own rows after its edits there, in their order."""
    variant.unseen.discard(hook)
    current = before
    for write in variant.edits:
        if write.hook == hook:
            new, selected = replacement_and_mask(write, clean, current)
            current = torch.where(selected, new, current)
    variant.changed = variant.changed or (current is not before and not torch.equal(current, before))
    for write in variant.edits:
        for name, read in write.replacement.hooks_read(write).items():
            if read == hook:
                clean.reads[id(write), name] = current
    return current
