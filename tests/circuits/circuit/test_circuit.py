"""Circuits as sets: names, operations, tables and files."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from circuits import CircuitsError, circuit, patch, run


def test_names_of_all_kinds_are_read_alike():
    c = circuit.edges(
        ["embed -> L0H1.q", "mlp_out.0 -> mlp_pre.1", "L0H1 -> 1.3.v", "pos_embed -> 0.0.k", "mlp1 -> output"]
    )
    ordered = "pos_embed -> 0.0.k; embed -> 0.1.q; 0.1 -> 1.3.v; mlp0 -> mlp1; mlp1 -> output"
    assert "; ".join(c) == ordered
    assert c == circuit.edges(ordered) == circuit.edges(ordered.replace("; ", "\n").replace(" -> ", "->"))
    assert "mlp_out.1 -> output" in c
    assert "embed -> mlp1" not in c
    assert "; ".join(circuit.nodes(["mlp1", "1.0", "embed", "L0H10", "0.2"])) == "embed; 0.2; 0.10; 1.0; mlp1"


@pytest.fixture
def model(hooked_only, make_model):
    return make_model(0, hooked_only)


def points(c, full):
    """A circuit as a set of (member, position), for runs of four positions."""
    return {(name, at) for name in full for at in range(4) if f"{name} @ {at}" in c}


def test_operations_are_those_of_sets_of_members_and_positions(model):
    full = circuit.full(model)
    names, rng = list(full), np.random.default_rng(0)
    everything = points(full, names)
    assert len(everything) == 4 * len(full)

    def drawn():
        chosen = rng.choice(len(names), 40, replace=False)
        suffixes = ["", " @ 1", " @ 0, 2", " @ all but 2", " @ all but 0,1"]
        return circuit.edges([names[index] + suffixes[rng.integers(5)] for index in chosen])

    for _ in range(10):
        a, b = drawn(), drawn() | full & drawn()
        sets = points(a, names), points(b, names)
        assert points(a | b, names) == sets[0] | sets[1]
        assert points(a & b, names) == sets[0] & sets[1]
        assert points(a - b, names) == sets[0] - sets[1]
        assert points(full - a, names) == everything - sets[0]
        assert points(~(full & a), names) == everything - sets[0]
        assert ~~(full & a) == a
        assert (a & b) <= a
        assert (a <= b) == (sets[0] <= sets[1])
        assert len({a, full & a, a | a, a - circuit.edges([])}) == 1


def test_the_full_graph_has_every_pair_in_order(model):
    full = circuit.full(model)
    # Two embeddings; layer by layer 12 inputs of heads, then an MLP's, then the output.
    senders_before = {0: 2, 1: 2 + 5}
    expected = sum(12 * before + before + 4 for before in senders_before.values()) + 12
    assert len(full) == expected
    assert len(circuit.full(model, "nodes")) == 12
    assert full == circuit.edges(list(full), model)


# ---- From a screening


def metric(output):
    return output[:, -1].square().sum(-1)


@pytest.fixture
def found(model, tokens, other_tokens):
    return patch.edges(model, tokens, other_tokens, metric, exact=12)


@pytest.mark.parametrize("kind", ["edges", "nodes"])
def test_a_circuit_of_a_screening_is_one_of_its_model(
    kind, model, make_model, hooked_only, tokens, other_tokens, tmp_path
):
    """Its names are there in a deeper model too, where they would cut all that is new."""
    screen, named = (patch.edges, circuit.edges) if kind == "edges" else (patch.screen, circuit.nodes)
    found = screen(model, tokens, other_tokens, metric, exact=1)
    made = {"top": found.top(4), "all": found.top(len(found.frame)), "union": named([]) | found.top(2)}
    made |= {"difference": found.top(4) - found.top(2), "complement": ~found.top(4)}
    found.top(4).write(tmp_path / "c.json")
    made |= {"read": circuit.read(tmp_path / "c.json"), "empty": found.top(0)}
    assert made["complement"] == circuit.full(model, kind) - found.top(4)
    deeper, heads = (make_model(0, hooked_only, n_layers=3), make_model(0, hooked_only, n_heads=2))
    for c in made.values():
        assert c.graph == circuit.full(model, kind).graph
        assert run(model, tokens, c.keep(other_tokens)).shape[:2] == tokens.shape
        for other in (deeper, heads):
            with pytest.raises(
                CircuitsError, match="the circuit is of a model of another shape: 2 layers"
            ) as caught:
                run(other, tokens, c.keep(other_tokens))
            assert "\n" not in str(caught.value)
    with pytest.raises(
        CircuitsError, match=r"circuit\.curve: it: the circuit is of a model of another shape"
    ):
        circuit.curve(deeper, {"it": found}, tokens, other_tokens, metric)


def test_names_and_files_are_read_without_torch(found, tmp_path):
    found.top(4).write(tmp_path / "c.json")
    code = (
        "import sys; from circuits import circuit; c = circuit.read(sys.argv[1]); "
        "assert (c | circuit.nodes([]) if c.kind == 'nodes' else c - circuit.edges(list(c)[:1])) <= c; "
        "assert not {'torch', 'numpy', 'pandas'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c.json")], check=True)


# ---- Tables and files


@pytest.mark.parametrize("kind", ["edges", "nodes", "screened", "empty"])
def test_what_is_written_is_read(kind, model, found, tmp_path):
    c = {
        "edges": circuit.full(model)
        - circuit.edges(["0.1 -> 1.3.q", "0.1 -> mlp0 @ 4", "embed -> mlp0 @ all but 1"]),
        "nodes": circuit.nodes(["0.1 @ 3", "mlp1"]),
        "screened": found.top(6),
        "empty": circuit.edges([]),
    }[kind]
    c.write(tmp_path / "circuit.json")
    again = circuit.read(tmp_path / "circuit.json")
    assert again == c
    assert again.graph == c.graph
    pd.testing.assert_frame_equal(again.frame, c.frame)
    assert again.sha256 == c.sha256
