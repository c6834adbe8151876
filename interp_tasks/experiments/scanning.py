"""Which heads matter, alone and together: one edit of each head, each layer, all heads, and groups by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interp_tasks.experiments.head_edits import HeadEdit, by_layer
from interp_tasks.experiments.measuring import Found, measure, swept
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.specifications import check_groups
from interp_tasks.experiments.subjects import Options, Subject

if TYPE_CHECKING:
    from typing_extensions import Unpack


def heads(
    refs: str | Sequence[str],
    mode: str = "uniform",
    keys: str | Sequence[int] | None = None,
    queries: str | Sequence[int] = "all",
    groups: Mapping[str, str] | Sequence[str] = (),
    **options: Unpack[Options],
) -> Result:
    """Ablate every head alone, each layer's heads together, all heads, and groups of your own.

    Args:
        refs: one or several REFs; all see the same examples.
        mode, keys, queries: what is done to the heads, as in :func:`ablation`.
        groups: name -> heads (``{"copying": "0.1+2.3-5"}``), or texts ``"copying=0.1+2.3-5"``.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Returns:
        A :class:`Result`; ``plot()`` shows effects as a map, layer by head, and groups as points.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    edit = HeadEdit.read(mode, keys, queries)
    named = check_groups(groups)

    def look(subject: Subject) -> Found:
        from circuits import Head
        from circuits import heads as select

        every = select("all", subject.model)
        chosen: dict[str, tuple[Head, ...]] = {str(head): (head,) for head in every}
        chosen |= by_layer(every)
        chosen["all"] = every
        chosen |= {name: select(spec, subject.model) for name, spec in named.items()}
        return swept(subject, edit.on(subject, chosen), edit.name)

    return measure(
        "heads",
        refs,
        options,
        look,
        config={**edit.describe(), "groups": named},
        notes=edit.notes,
    )
