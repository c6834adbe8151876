"""Rows of a result about neurons and attention weights over the grid: of single ones, of clusters, of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from interp_tasks.experiments._neurons.features import Features, MeasuredFeatures
from interp_tasks.experiments._neurons.table import (
    ACTIVE,
    ACTIVE_EACH,
    ALL,
    ALONE,
    CLUSTER,
    CLUSTERED,
    CLUSTERS,
    COUNT,
    DEAD,
    FIRST,
    FREQUENCY,
    IN_CLUSTERS,
    JOINTLY,
    MEAN,
    ONE,
    PAIRS,
    SECOND,
    TO_ONE,
)


def rows_of(measures: MeasuredFeatures, wanted: Sequence[int]) -> list[dict[str, Any]]:
    """Returns rows of the chosen features, of clusters and of all."""
    features, common = measures.features, common_of(measures.features)
    rows: list[dict[str, Any]] = []
    for at in wanted:
        about = {**common, "variant": features.names[at], "head": features.heads[at]}
        rows += [{**about, **row} for row in one_feature(measures, at)]
    if features.site == "pattern":
        return rows + [{**common, **row} for row in preferences(features)]
    for variant, metrics in together(measures).items():
        rows += [{**common, "variant": variant, **row} for row in metrics]
    return rows


def common_of(features: Features) -> dict[str, Any]:
    """Returns the columns that all rows of one tensor share."""
    return {
        "intervention": features.label,
        "site": features.site,
        "layer": features.layer,
        "position": features.position,
        "n": features.grid.cells,
    }


def preferences(features: Features) -> Iterator[dict[str, Any]]:
    """Yields for each head the share of its mean attention to both digits that the one with more gets: 0.5 to 1."""
    means = features.values.double().mean(0).unflatten(0, (-1, 2))
    for head, pair in enumerate(means):
        about = {"variant": f"{features.layer}.{head}", "head": head}
        yield {**about, **row(TO_ONE, float(pair.max() / pair.sum()))}


def one_feature(measures: MeasuredFeatures, at: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of one feature; of one that does not vary only its mean."""
    yield row(MEAN, measures.features.values[:, at].double().mean())
    if float(measures.variance[at]) <= 0 or int(measures.clusters.best[at]) < 0:
        return
    yield row(FREQUENCY, measures.clusters.labels[int(measures.clusters.best[at])])
    yield row(FIRST, measures.first[at])
    yield row(SECOND, measures.second[at])
    for axis, share in measures.alone.items():
        yield row(ALONE.format(axis), share[at])
    yield row(JOINTLY, measures.jointly[at])
    yield row(ONE, max(float(share[at]) for share in measures.alone.values()))
    yield row(PAIRS, measures.pairs[at], measures.pairs_relabelled[at])
    yield row(ACTIVE, measures.active.counts[at])


def together(measures: MeasuredFeatures) -> dict[str, list[dict[str, Any]]]:
    """Returns rows of the neurons of each cluster, of all clusters, of all neurons, by variant."""
    import torch

    clusters, varying = measures.clusters, measures.clusters.best >= 0
    inside = clusters.assigned >= 0
    rows: dict[str, list[dict[str, Any]]] = {}
    groups = {f"{CLUSTER}{label}": clusters.neurons(label) for label in clusters.sizes}
    groups |= {IN_CLUSTERS: inside.nonzero().flatten(), ALL: varying.nonzero().flatten()}
    for variant, members in groups.items():
        weights = measures.variance[members]
        total_weight = float(weights.sum())
        rows[variant] = [row(COUNT, len(members))]
        if total_weight > 0:
            rows[variant] += [
                row(name, float((share[members] * weights).sum()) / total_weight)
                for name, share in ((FIRST, measures.first), (SECOND, measures.second))
            ]
    rows[IN_CLUSTERS] += [
        row(CLUSTERS, len(clusters.sizes)),
        row(CLUSTERED, float(inside.double().mean())),
    ]
    constant = row(DEAD, int((~varying).sum()))
    if not bool(varying.any()):
        rows[ALL] += [constant]
        return rows
    weights = measures.variance / measures.variance.sum()
    rows[ALL] += [
        *(row(ALONE.format(axis), (share * weights).sum()) for axis, share in measures.alone.items()),
        row(JOINTLY, (measures.jointly * weights).sum()),
        row(PAIRS, *(torch.nanmedian(each) for each in (measures.pairs, measures.pairs_relabelled))),
        row(ACTIVE, len(measures.active.keys)),
        row(ACTIVE_EACH, measures.active.counts[varying].double().mean()),
        constant,
    ]
    return rows


def row(metric: str, value: Any, baseline: Any = None) -> dict[str, Any]:
    columns = {"metric": metric, "value": float(value)}
    if baseline is not None:
        columns |= {"baseline": float(baseline), "effect": float(value) - float(baseline)}
    return columns
