"""Edits weights, and measures which metrics move: another checkpoint's components, or shuffled position embeddings.

Of :func:`transplant` the ``variant`` is the component and ``intervention`` says whose; ``config["done"]`` lists every
parameter that moved, with its sha256. Of :func:`permute` there is per checkpoint, choice and metric a row that pools
the draws (``draw`` empty), then one for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.model.weight_component_names import COMPONENTS
from interp_tasks.errors import UserError
from interp_tasks.measurement.loaded_checkpoints import (
    LoadedCheckpoint,
    Refs,
    load_source_model,
    resolve_and_check_sources,
    resolve_refs,
)
from interp_tasks.measurement.measure_checkpoints import MeasuredRows, measure, run_sweep
from interp_tasks.measurement.option_parsing import (
    as_list,
    check_draws,
    check_layer,
    edit_name,
    parse_position_list,
    split_at_commas_or_plus,
)
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import Result, experiment
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint

SOURCE = typer.Option(
    "--source", metavar="REF", help="The checkpoint that weights come from. Repeat for several."
)
COMPONENTS_OPTION = typer.Option(
    "--components", metavar="SPEC", help=f"{', '.join(COMPONENTS)}; qkv+mlp. Repeat for rows."
)
LAYERS = typer.Option("--layers", metavar="0,1", help="In these layers only.", show_default="all")
ALL = "all"
DRAWS = typer.Option("--draws", metavar="N", help="Random permutations.")
WHAT_OPTION = typer.Option(
    "--what",
    metavar="NAME",
    help="all; of a grid of positions rows, within-rows, columns, ... Repeat for rows.",
)
NOTES = (
    "Each draw is a random permutation of the positions in use, the same for every example and checkpoint.",
    "value: all draws pooled, its interval over examples. sd and range: of the values of single draws.",
)


@experiment(says={"source": None, "components": None, "layers": None}, judged_by_task=True)
def transplant(
    refs: Refs,
    source: Annotated[str | Sequence[str], SOURCE, list[str]],
    components: Annotated[str | Sequence[str], COMPONENTS_OPTION, list[str]] = "qkv",
    layers: Annotated[str | Sequence[int] | None, LAYERS, str | None] = None,
    **options: Unpack[Options],
) -> Result:
    """Give a model some weights of another checkpoint, and see which metrics move.

    Weights go from each --source to each --ckpt, with their biases; --out and --plot list every parameter that moved.

    Args:
        refs: one or several REFs, which receive the weights; all see the same examples.
        source: the REF of the checkpoint which lends them, of the same architecture. Several: rows for each, and
            ``plot()`` gives a map per component.
        components: ``q k v qkv o attn (= qkv+o) mlp embed pos_embed unembed ln1 ln2 ln_embed ln_final ln``, with
            biases; ``"qkv+mlp"`` moves both; a list: a row each.
        layers: only in these layers (default: all).
        options: see :class:`Examples`.
    """
    rows = [normalise_components(each) for each in as_list(components)]
    if not rows:
        raise UserError("--components: nothing to transplant; write qkv, mlp, attn, ...")
    chosen = None if layers is None else parse_position_list("--layers", layers)
    examples = Examples.of(options)
    found = resolve_refs(refs, examples)
    sources, lent = resolve_and_check_sources(source, found), dict[str, dict[str, Any]]()

    def measure_checkpoint(subject: LoadedCheckpoint) -> MeasuredRows:
        variants, components_of, names = {}, {}, {}
        for one in sources:
            if one.ref not in lent:
                lent[one.ref] = transplants_from_source(one, rows, chosen, examples.device)
            for row, variant in lent[one.ref].items():
                label = row if len(sources) == 1 else f"{row} of {one.label}"
                variants[label], components_of[label] = variant, row
                names[label] = edit_name(row, {"layers": chosen, "source": one.label})
        measured = run_sweep(subject, variants, names)
        named = measured.frame["variant"].map(components_of)
        return replace(measured, frame=measured.frame.assign(variant=named))

    def check_sizes(sizes: Any, name: str) -> None:
        for layer in chosen or ():
            check_layer(f"--layers {layer}", layer, sizes, name)

    resolved = [one.ref for one in sources]
    config = {"source": resolved if len(sources) > 1 else resolved[0], "components": rows, "layers": chosen}
    result = measure("transplant", found, options, measure_checkpoint, config=config, check_sizes=check_sizes)
    limited = "" if chosen is None else f", in layers {', '.join(map(str, chosen))} only"
    whose = sources[0].label if len(sources) == 1 else f"each of {len(sources)} checkpoints"
    moved = "; ".join(
        f"{row}: {', '.join(transplanted_names(one))}" for row, one in lent[resolved[0]].items()
    )
    notes = (
        f"Weights come from {whose}{limited}; everything else stays the checkpoint's own.",
        f"Moved, N being every such layer: {moved}.",
    )
    return replace(result, notes=(*result.notes, *notes))


def transplants_from_source(
    source: ResolvedCheckpoint, rows: Sequence[str], layers: Any, device: str
) -> dict[str, Any]:
    """Returns the intervention that gives each component the source's weights."""
    from circuits import transplant as transplants

    model = load_source_model(source, device)
    return {row: transplants.weights(model, row.split("+"), layers) for row in dict.fromkeys(rows)}


def normalise_components(spec: str) -> str:
    """Returns components of a model with ``+`` between them."""
    for part in split_at_commas_or_plus(spec):
        if part not in COMPONENTS:
            raise UserError(
                f"--components {spec!r}: no component {part!r}; choose from {', '.join(COMPONENTS)}"
            )
    return "+".join(dict.fromkeys(split_at_commas_or_plus(spec)))


def transplanted_names(intervention: Any) -> list[str]:
    """Returns the state_dict names of what moves, those that differ by their layer alone as one."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name, _ in intervention.values))


def transplant_figures(result: Result) -> list[Figure]:
    """Returns with several sources a map per component and metric, receiver by source; else the usual figure."""
    from circuits.figures.panel_grid import draw_panels, short_names
    from circuits.figures.panel_kinds import NUMBERED, heatmap
    from interp_tasks.measurement.result_table_plots import table_figures as usual

    frame = result.frame
    if not isinstance(result.config["source"], list):
        return usual(frame, result.examples())
    sources = frame["intervention"].str.extract(r"source=(.*)\)", expand=False)
    short = short_names([*dict.fromkeys([*frame["ref"], *sources])])
    frame = frame.assign(run=frame["ref"].map(short), source=sources.map(short))
    panels = []
    for (component, metric), rows in frame.groupby(["variant", "metric"], sort=False):
        cells = rows.pivot_table(index="run", columns="source", values="value", sort=False, dropna=False)
        end = float(frame.loc[frame["metric"] == metric, "value"].max())
        # Where cells have numbers, a colour bar would say them again.
        options: dict[str, Any] = {"end": end, "bar": len(cells.columns) > NUMBERED}
        title = f"{component}: {metric}"
        panels.append(heatmap(cells, title, unit=str(metric), across="weights of", down="run", **options))
    caption = (
        "Down: the checkpoint that is run. Across: the one whose weights it gets. A cell that gets its own is "
        f"the unedited model. Colours mean the same in every map of a metric. {result.examples()}"
    ).strip()
    drawn = draw_panels(panels, columns=frame["metric"].nunique(), share_y=True)
    return [Figure(drawn, "Every metric, by who receives the weights and whose they are", caption)]


@experiment(says={"draws": None, "what": [ALL]}, judged_by_task=True)
def permute(
    refs: Refs,
    draws: Annotated[int, DRAWS] = 20,
    what: Annotated[str | Sequence[str], WHAT_OPTION, list[str]] = ALL,
    **options: Unpack[Options],
) -> Result:
    """Permute the position embeddings, many times, and see which metrics move.

    The table shows the draws pooled, and how they differ; files, JSON and CSV have a row for each draw too.

    Args:
        refs: one or several REFs; all see the same examples and the same permutations.
        draws: how many random permutations, each the same for every example.
        what: ``"all"`` positions; or, where the task declares positions that are a grid (``grid_axes()``), by the
            names of its axes, ``"rows"``: whole rows change places; ``"within-rows"``: entries inside each row, each
            row by its own permutation. A list: a row each.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.
    """
    check_draws(draws)
    chosen = list(dict.fromkeys(as_list(what)))
    if not chosen:
        raise UserError(f"--what: write {ALL}, or of a grid rows, within-rows, ...")

    def measure_checkpoint(subject: LoadedCheckpoint) -> MeasuredRows:
        from circuits import draws as drawn

        makers = permutation_drawers(subject, chosen)
        variants = {name: drawn(make, draws, subject.seed) for name, make in makers.items()}
        return run_sweep(subject, variants, {name: edit_name(name, {"draws": draws}) for name in variants})

    config, check = {"draws": draws, "what": chosen}, partial(permutation_drawers, chosen=chosen)
    return measure("permute", refs, options, measure_checkpoint, config=config, notes=NOTES, check=check)


def permutation_drawers(subject: LoadedCheckpoint, chosen: Sequence[str]) -> dict[str, Callable[[int], Any]]:
    """Returns by the name of its row what draws each permutation from a seed."""
    from circuits import permute as permutations

    axes = () if subject.task is None else subject.task.grid_axes()
    # Those of the inputs are no grid of positions.
    axes = tuple(axis for axis in axes if axis.position is None)
    shape = tuple(len(axis.values) for axis in axes)
    known: dict[str, Callable[[int], Any]] = {ALL: permutations.positions}
    for index, axis in enumerate(axes):
        known[f"{axis.name}s"] = partial(permutations.slices, shape, index)
        known[f"within-{axis.name}s"] = partial(permutations.within, shape, index)
    if missing := [name for name in chosen if name not in known]:
        has = f"the grid has {', '.join(known)}" if axes else "its task declares no grid of positions"
        raise UserError(
            f"--what {missing[0]}: no such positions in {subject.name}: {has}; write {ALL}, or those"
        )
    return {"positions" if name == ALL else name: known[name] for name in chosen}
