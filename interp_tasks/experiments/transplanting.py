"""What a component holds: give a model another checkpoint's weights of it, and see which metrics move."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments.donors import check_donor
from interp_tasks.experiments.measuring import Found, measure, swept
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.specifications import called, check_components, check_layers
from interp_tasks.experiments.subjects import Examples, Options, Subject

if TYPE_CHECKING:
    from typing_extensions import Unpack


def transplant(
    refs: str | Sequence[str],
    source: str,
    components: str | Sequence[str] = "qkv",
    layers: str | Sequence[int] | None = None,
    **options: Unpack[Options],
) -> Result:
    """Run checkpoints with some weights of another one, and compare with the checkpoints as they are.

    Args:
        refs: one or several REFs, which receive the weights; all see the same examples.
        source: the REF of exactly one checkpoint, which lends them, of the same architecture.
        components: ``q k v qkv o attn (= qkv+o) mlp embed pos_embed unembed ln1 ln2 ln_final ln``, each with its
            biases; ``"qkv+mlp"`` moves both; a list: a row each.
        layers: only in these layers (default: all).
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Returns:
        A :class:`Result`; its ``config["done"]`` lists every parameter that moved, with its sha256.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    rows = [check_components(each) for each in ([components] if isinstance(components, str) else components)]
    if not rows:
        raise UserError("--components: nothing to transplant; write qkv, mlp, attn, ...")
    where = check_layers(layers, rows)
    examples = Examples.of(options)
    donor = check_donor(source, refs, examples)
    names = {row: called(row, {"layers": where, "source": donor.label}) for row in rows}
    made: dict[str, Any] = {}

    def look(subject: Subject) -> Found:
        from circuits import transplant as transplants

        if not made:
            model = donor.load(options.get("device", "cpu")).model
            made.update({row: transplants.weights(model, row.split("+"), where) for row in rows})
        return swept(subject, made, names)

    limited = "" if where is None else f", in layers {', '.join(map(str, where))} only"
    result = measure(
        "transplant",
        refs,
        options,
        look,
        config={"source": donor.resolved.ref, "components": rows, "layers": where},
        notes=(f"Weights come from {donor}{limited}; everything else stays the checkpoint's own.",),
    )
    moved = (f"{row}: {', '.join(parameters(one))}" for row, one in made.items())
    return replace(result, notes=(*result.notes, f"Moved, N being every such layer: {'; '.join(moved)}."))


def parameters(intervention: Any) -> list[str]:
    """The state_dict names of what moves, those that differ by their layer alone as one."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name, _ in intervention.values))
