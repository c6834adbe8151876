"""Reads circuits from files, and compares them with a model that is not loaded yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from circuits.circuit import Circuit
    from circuits.circuit._graph import Graph


def read_circuit(file: Path) -> Circuit:
    """Returns the circuit of a file.

    Raises:
        UserError, CircuitsError: for a file that cannot be read, or holds none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or "members" not in content:
        raise UserError(f"--keep {file} is no circuit; give a file that circuit --write has written")
    from circuits import circuit as circuits

    return circuits.read(file)


def check_circuit(circuit: Circuit, sizes: Any, said: str) -> None:
    """Refuses a circuit of a model of another shape, or with members that this one lacks, by its configuration alone.

    Args:
        sizes: as in :class:`PendingCheckpoint`.
        said: names the file and the model.

    Raises:
        CircuitsError: in one line.
    """
    graph = graph_of(sizes)
    graph.check_same(circuit.graph, said)
    graph.fitted(circuit.where, circuit.kind, said)


def graph_of(sizes: Any) -> Graph:
    """Returns the graph of a HookedTransformer of this configuration."""
    from circuits.circuit._graph import Graph

    grouped = sizes.n_key_value_heads is not None and not sizes.ungroup_grouped_query_attention
    return Graph(
        sizes.n_layers,
        sizes.n_heads,
        sizes.n_key_value_heads if grouped else sizes.n_heads,
        mlps=not sizes.attn_only,
        parallel=sizes.parallel_attn_mlp,
        positions=sizes.positional_embedding_type != "rotary",
    )
