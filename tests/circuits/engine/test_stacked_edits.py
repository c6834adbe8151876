"""Edits that many variants make at once: what one more head costs in operations, and that results are the same."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from circuits import ablate, edit, heads, patch, sweep
from circuits.engine.stacked_edits import edited_at_once

FEW = {"draws": 1, "flips": 1}
VIEWS = {
    *("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "select", "slice", "split"),
    *("_unsafe_view", "split_with_sizes", "detach", "alias", "unbind", "as_strided"),
}


class Operations(TorchDispatchMode):
    """The operations that are dispatched inside, by name, views left out."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        self.seen[name] += name not in VIEWS
        return function(*args, **(kwargs or {}))


def metric(output):
    return output[:, -1].sum(1)


def kinds(source):
    return {
        "zero": ablate.zero,
        "mean": lambda head: ablate.mean(head, source),
        "resample": lambda head: ablate.resample(head, source),
        "patch": lambda head: patch.activations("z", source, heads=head),
    }


@pytest.fixture
def wide(make_model):
    return make_model(n_heads=4, d_head=4)


@pytest.mark.parametrize("engine", ["fast", "resumed"])
@pytest.mark.parametrize("positions", [None, [-1]])
@pytest.mark.parametrize("kind", ["zero", "mean", "resample", "patch"])
def test_one_more_head_costs_its_metric_and_no_operation_of_ours_but_a_copy_and_a_conversion(
    wide, tokens, other_tokens, engine, positions, kind
):
    make = kinds(other_tokens)[kind]

    def counted(count):
        layer = wide.cfg.n_layers - 1
        variants = ablate.each(make, [f"{layer}.{head}" for head in range(count)])
        for _ in range(2):  # the first is measured by a meter
            with Operations() as operations:
                sweep(wide, tokens, variants, metric=metric, positions=positions, engine=engine, **FEW)
        return operations.seen

    few, more = counted(3), counted(4)
    output = torch.zeros(2, 3, 4)
    with torch.no_grad(), Operations() as of_metric:
        metric(output)
    assert (more - few).total() <= of_metric.seen.total() + 2
    assert not few - more


@pytest.mark.parametrize("engine", ["fast", "resumed"])
@pytest.mark.parametrize("kind", ["zero", "mean", "resample", "patch"])
def test_edits_made_at_once_give_what_each_gives_by_itself(
    wide, tokens, other_tokens, engine, kind, monkeypatch
):
    variants = ablate.each(kinds(other_tokens)[kind], heads("all", wide))
    together = sweep(wide, tokens, variants, metric=metric, engine=engine, **FEW).frame
    calls = []
    for module in ("branches", "tails"):
        monkeypatch.setattr(
            f"circuits.engine.{module}.edited_at_once", lambda *given: calls.append(given) and None
        )
    alone = sweep(wide, tokens, variants, metric=metric, engine=engine, **FEW).frame
    assert calls
    assert together["value"].to_list() == pytest.approx(alone["value"].to_list(), rel=1e-6, abs=1e-7)
    assert together["null_effect"].to_list() == alone["null_effect"].to_list()


def test_a_variant_among_others_that_changes_nothing_has_no_effect(hooked_only, wide, tokens):
    with torch.no_grad():
        for block in wide.blocks:
            block.attn.W_V[1] = 0
            block.attn.b_V[1] = 0
    for engine in ("fast", "resumed"):
        found = sweep(wide, tokens, ablate.each(ablate.zero, heads("all", wide)), engine=engine, **FEW).frame
        assert found[found["head"] == 1]["null_effect"].all()
        assert not found[found["head"] != 1]["null_effect"].any()


def test_functions_and_single_positions_are_edited_by_themselves(wide, tokens, monkeypatch):
    found = []

    def spied(*given):
        found.append(edited_at_once(*given))
        return found[-1]

    monkeypatch.setattr("circuits.engine.branches.edited_at_once", spied)
    pairs = {
        "function": [edit("z", lambda z: 2 * z, heads=f"1.{head}") for head in range(2)],
        "positions": [ablate.zero("1.0", positions=[0]), ablate.zero("1.1", positions=[1])],
        "different": [ablate.zero("1.0"), ablate.mean("1.1", tokens)],
    }
    for variants in pairs.values():
        sweep(
            wide,
            tokens,
            {str(at): variant for at, variant in enumerate(variants)},
            metric=metric,
            engine="fast",
            **FEW,
        )
    assert found
    assert all(one is None for one in found)
