"""What the picture of a circuit holds: its nodes by layer, its edges by width."""

import pytest

from circuits import circuit
from circuits.circuit._circuit import Circuit
from circuits.circuit._graph_and_names import EstimateAndExactEffect

NAMES = [
    "embed -> 0.1.q",
    "pos_embed -> 0.1.k",
    "0.1 -> 1.2.v",
    "0.1 -> mlp1",
    "1.2 -> output",
    "mlp1 -> output",
]


@pytest.fixture
def c():
    bare = circuit.edges([*NAMES, "embed -> mlp1 @ 2,3"])
    effects = {
        edge: EstimateAndExactEffect("loss", 0.5 * index, -float(index) if index % 2 else None)
        for index, (edge, _) in enumerate(bare.members)
    }
    return Circuit.of("edges", bare.where, None, effects)


def nodes_of(figure):
    trace = figure.data[-1]
    return dict(zip(trace.text, zip(trace.x, trace.y, strict=True), strict=True))


def lines_of(figure):
    """The traces of edges: between those of the key and that of the nodes."""
    return [trace for trace in figure.data if trace.opacity is not None]


def test_rows_go_up_in_the_order_of_computation(c):
    places = nodes_of(c.plot())
    assert set(places) == {"embed", "pos_embed", "0.1", "1.2", "mlp1", "output"}
    height = {name: y for name, (_, y) in places.items()}
    assert height["embed"] == height["pos_embed"]
    assert [*height][-4:] == sorted(["0.1", "1.2", "mlp1", "output"], key=height.get)
    assert len(set(places.values())) == len(places)


def test_lines_lead_from_sender_to_receiver_as_wide_as_their_effects(c):
    figure = c.plot()
    places, lines = nodes_of(figure), lines_of(figure)
    sizes = {}
    for trace, row in zip(lines, c.frame.to_dict("records"), strict=True):
        start = places[row["sender"]]
        assert trace.x[0] == start[0]
        assert start[1] < trace.y[0] < start[1] + 0.5
        end = places[row["receiver"].rsplit(".", 1)[0] if row["receiver"][-1] in "qkv" else row["receiver"]]
        assert abs(trace.x[-1] - end[0]) < 0.2
        assert end[1] - 0.5 < trace.y[-1] < end[1]
        assert row["name"] in trace.text[0]
        assert (f"{row['effect']:.4g}" in trace.text[0]) == (row["effect"] == row["effect"])
        sizes[trace.line.width] = abs(row["effect"] if row["effect"] == row["effect"] else row["estimate"])
        assert ("at 2,3" in trace.text[0]) == (row["positions"] == "2,3")
    assert sorted(sizes) == sorted(sizes, key=sizes.get)
    assert max(sizes) == pytest.approx(6.0)
