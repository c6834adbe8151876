"""Makes the rows of the table of a circuit: of the whole, of its curve over sizes, and of its members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_tasks.experiments._circuit.settings import Search, ranked_by

if TYPE_CHECKING:
    import pandas

    from circuits.circuit import Circuit, Curve

#: What rows are about: the circuit, the first so many of the ranking, or one member by its name.
CIRCUIT, TOP = "circuit", "top "
#: And a ranking as a whole.
CURVE = "curve"
#: Metrics of the circuit's row, and of curves.
SIZE, FAITHFULNESS = "size", "faithfulness"
ON_FINDING_HALF, LARGEST_RANDOM = "faithfulness, finding half", "faithfulness, best of random"
GAP, AREAS = "gap", ("CPR", "CMD")
#: The ranking that a curve is compared with.
RANDOM = "random"
#: What made the effect of a member that was measured.
MEASURED_BY = "exact"


def ends_rows(ends: pandas.Series, total: int, search: Search) -> list[dict[str, Any]]:
    """Returns how clean and source run differ: all the rows of a checkpoint that has no circuit."""
    about = {"variant": CIRCUIT, "intervention": how_found(search), "n": int(ends["n"]), "engine": "naive"}
    nothing = float("nan")
    return [
        {**about, "metric": SIZE, "value": nothing, "baseline": float(total)},
        {
            **about,
            "metric": GAP,
            "value": ends["gap"],
            "value_ci_low": ends["gap_ci_low"],
            "value_ci_high": ends["gap_ci_high"],
        },
        {**about, "metric": str(ends["metric"]), "value": nothing, "baseline": ends["clean"]},
    ]


def how_found(search: Search) -> str:
    """Returns the method that found a circuit; of one that was given, that."""
    return "given" if search.keep is not None else search.method


def circuit_rows(result: Any, total: int, on_finding_half: float, search: Search) -> list[dict[str, Any]]:
    """Returns the rows of a circuit: its size, faithfulness beside random circuits, metric and gap."""
    size, gap, value = ends_rows(result.baseline.iloc[0], total, search)
    row = result.frame.iloc[0]
    about = {name: value[name] for name in ("variant", "intervention", "n", "engine")}
    rows = [
        {**size, "value": float(row["size"])},
        {
            **about,
            "metric": FAITHFULNESS,
            "value": row["faithfulness"],
            "value_ci_low": row["faithfulness_ci_low"],
            "value_ci_high": row["faithfulness_ci_high"],
            "baseline": row["random_mean"],
            "effect": row["faithfulness"] - row["random_mean"],
        },
        {
            **value,
            "value": row["value"],
            "value_ci_low": row["value_ci_low"],
            "value_ci_high": row["value_ci_high"],
        },
        gap,
    ]
    if search.random:
        rows.append({**about, "metric": LARGEST_RANDOM, "value": row["random_high"]})
    if on_finding_half == on_finding_half:
        rows.append({**about, "metric": ON_FINDING_HALF, "value": on_finding_half})
    return rows


def curve_rows(curve: Curve, search: Search) -> list[dict[str, Any]]:
    """Returns the rows of every size, beside as many members in a random order, and the areas."""
    rows: list[dict[str, Any]] = []
    frames = dict(iter(curve.frame.groupby("ranking", sort=False)))
    random = frames[RANDOM].set_index("size")
    clean = float(curve.baseline["clean"].iloc[0])
    for row in frames[search.method].to_dict("records"):
        about = {"variant": f"{TOP}{row['size']}", "intervention": search.method, "n": row["n"]}
        beside = float(random["faithfulness"].get(row["size"], float("nan")))
        rows += [
            {
                **about,
                "metric": FAITHFULNESS,
                "value": row["faithfulness"],
                "value_ci_low": row["faithfulness_ci_low"],
                "value_ci_high": row["faithfulness_ci_high"],
                "baseline": beside,
                "effect": row["faithfulness"] - beside,
            },
            {
                **about,
                "metric": row["metric"],
                "value": row["value"],
                "value_ci_low": row["value_ci_low"],
                "value_ci_high": row["value_ci_high"],
                "baseline": clean,
            },
        ]
    areas = curve.areas.set_index("ranking")
    for area in AREAS:
        rows.append(
            {
                "variant": CURVE,
                "intervention": search.method,
                "n": int(curve.settings["n"]),
                "metric": area,
                "value": areas.loc[search.method, area],
                "value_ci_low": areas.loc[search.method, f"{area}_ci_low"],
                "value_ci_high": areas.loc[search.method, f"{area}_ci_high"],
                "baseline": areas.loc[RANDOM, area],
                "effect": areas.loc[search.method, area] - areas.loc[RANDOM, area],
            }
        )
    return [{**row, "engine": "naive"} for row in rows]


def member_rows(circuit: Circuit, screened: Any, search: Search) -> list[dict[str, Any]]:
    """Returns a row for each member, the largest first: its exact effect where it was measured, else the estimate."""
    import pandas

    from circuits import circuit as circuits

    # The table of a screening is in the order of its default ranking.
    by_name = dict(zip(screened.ranking(), screened.frame.to_dict("records"), strict=True))
    make = circuits.edges if circuit.kind == "edges" else circuits.nodes
    rows = []
    for name in screened.ranking(by=ranked_by(search.method))[: len(circuit)]:
        row = by_name[name]
        measured = bool(pandas.notna(row["effect"]))
        of = "effect" if measured else "estimate"
        rows.append(
            {
                "variant": next(iter(make([name]))),
                "intervention": screened.settings["direction"],
                "metric": row["metric"],
                "value": row["value"],
                "baseline": row["baseline"],
                "effect": row[of],
                "effect_ci_low": row[f"{of}_ci_low"],
                "effect_ci_high": row[f"{of}_ci_high"],
                "n": int(row["n"]),
                "engine": MEASURED_BY if measured else screened.settings["method"],
            }
        )
    return rows
