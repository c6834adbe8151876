"""Transformers compiled from programs, whose circuits are known: found, kept and taken apart."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from circuits import circuit, run

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "known_circuits.py"
NAMES = ["detect_pattern", "frac_prevs", "hist", "induction", "pair_balance", "reverse", "sort"]


@pytest.fixture(scope="module")
def benchmark():
    pytest.importorskip("safetensors")
    transformer_lens = pytest.importorskip("transformer_lens")
    if "HookedTransformer" not in vars(transformer_lens):
        pytest.skip("the installed transformer-lens has no HookedTransformer")
    spec = importlib.util.spec_from_file_location("known_circuits", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert module.NAMES == NAMES
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", NAMES)
def test_a_rotated_basis_is_the_same_function(benchmark, name):
    known, rotated = benchmark.Known.load(name), benchmark.Known.load(name, 1)
    base, *_ = known.pairs(8)
    torch.testing.assert_close(run(known.model, base), run(rotated.model, base), rtol=0, atol=1e-4)
    assert float((known.model.W_E - rotated.model.W_E).detach().abs().max()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_exact_effects_make_no_mistake(benchmark, name):
    """In a rotated basis, as no component is then a coordinate."""
    known = benchmark.Known.load(name, 0)
    sizes, *_ = benchmark.ranked(known, ("exact", "distance"), 64)
    truth = len(known.truth)
    assert benchmark.scores(sizes, known.truth) == {"AUROC": 1, "precision": 1, "recall": 1}
    largest = sorted(sizes, key=sizes.get, reverse=True)
    assert set(largest[:truth]) == set(known.truth)
    # The gap between what matters and what does not is wide.
    assert sizes[largest[truth]] < 1e-6 < 1e-3 * sizes[largest[truth - 1]]


def test_scores_by_hand(benchmark):
    truth = circuit.edges(["embed -> mlp0", "embed -> 0.0.q"])
    sizes = {"embed -> mlp0": 3.0, "embed -> 0.0.k": 1.0, "embed -> 0.0.q": 0.0, "embed -> 0.0.v": 0.0}
    found = benchmark.scores(sizes, truth)
    # Of four pairs (true, other) two are won, one is lost, one is a tie.
    assert found == {"AUROC": 2.5 / 4, "precision": 0.5, "recall": 0.5}
    sizes["embed -> 0.0.k"] = 0.0
    assert benchmark.scores(sizes, truth) == {"AUROC": 0.75, "precision": 1.0, "recall": 0.5}


@pytest.mark.parametrize("name", NAMES)
def test_the_true_circuit_is_faithful_and_none_of_its_edges_can_be_spared(benchmark, name):
    known = benchmark.Known.load(name)
    distances = {"whole": []} | {edge: [] for edge in known.truth}
    apart = []
    for length, tokens in known.tokens.items():
        if len(tokens) < 2:
            continue
        source, read = tokens.roll(1, 0), known.read[length]
        clean = run(known.model, tokens)

        def distance(output, clean=clean, read=read):
            """By example: the squared distance from the clean output over what is read."""
            return ((output - clean).square().sum(-1) * read).sum(1).double()

        apart.append(distance(run(known.model, source)))
        distances["whole"].append(distance(run(known.model, tokens, known.truth.keep(source))))
        for edge in known.truth:
            rest = known.truth - circuit.edges([edge])
            distances[edge].append(distance(run(known.model, tokens, rest.keep(source))))
    far = torch.cat(apart)
    assert float(torch.cat(distances["whole"]).mean() / far.mean()) < 1e-4
    differ = far > 1e-3
    assert differ.any()
    for edge in known.truth:
        faithfulness = 1 - torch.cat(distances[edge])[differ] / far[differ]
        assert float(faithfulness.min()) < 0.1, edge


def test_the_tests_of_a_true_circuit(benchmark):
    known = benchmark.Known.load("sort")
    base, source, read = (half[:32] for half in known.pairs(64))
    metric, rows = known.metric("projection", base, source, read), torch.arange(32)
    found = circuit.evaluate(
        known.model, {"true": known.truth}, base, source, metric, batch=rows, random=10, subsets=6
    )
    row = found.frame.iloc[0]
    assert abs(row["faithfulness"] - 1) < 1e-4
    assert row["random_high"] < 0.9
    assert row["p_random"] == pytest.approx(1 / 11)
    assert (found.completeness["difference"].abs() < 0.1).all()
    assert (found.minimality["p_adjusted"] < 0.05).all()
    assert (found.minimality["share"] > 0.05).all()
