"""``interp-run tasks data``: answers of a few tasks against arithmetic by hand; what is refused."""

import numpy as np
import pytest
import torch

import tasks
from interp_tasks.experiments import COLUMNS, data
from tasks import GridAxis

P = 11


def value(frame, variant, metric):
    (found,) = frame.loc[(frame["variant"] == variant) & (frame["metric"] == metric), "value"]
    return found


def test_the_grid_and_its_answers_are_arithmetic():
    result = data("miiii", {"p": P})
    shown = result.data["inputs"]
    x0, x1 = np.indices((P, P))
    assert np.array_equal(shown.tokens["x0"], x0)
    assert np.array_equal(shown.tokens["x1"], x1)
    for q in (2, 3, 5, 7):
        assert np.array_equal(shown.answers[f"mod_{q}"], (x0 + P * x1) % q)
        assert value(result.frame, f"mod_{q}", "classes") == q
        assert value(result.frame, f"mod_{q}", "chance accuracy") == pytest.approx(1 / q)
        assert value(result.frame, f"mod_{q}", "coefficient of x0") == 1
        assert value(result.frame, f"mod_{q}", "coefficient of x1") == P % q
        often = np.bincount(np.arange(P * P) % q).max()
        assert value(result.frame, f"mod_{q}", "accuracy of the commonest") == often / P**2
    # Beside the answers, as in figure 3; no row is about it.
    assert np.array_equal(shown.answers["sum"], (x0 + x1) % P)
    assert "sum" not in set(result.frame["variant"])
    assert tuple(result.frame.columns) == COLUMNS
    assert value(result.frame, "all answers", "chance accuracy") == pytest.approx(
        np.mean([1 / q for q in (2, 3, 5, 7)])
    )
    sizes = [value(result.frame, split, "inputs") for split in ("train", "validation", "test")]
    assert sum(sizes) == P * P
    assert sizes[0] == int(0.3 * P * P)


def test_the_order_of_digits_matters_unless_q_divides_p_minus_1():
    frame = data("miiii", {"p": P}).frame
    for q in (2, 3, 5, 7):
        pairs = [((a + P * b) % q == (b + P * a) % q) for a in range(P) for b in range(P) if a != b]
        assert value(frame, f"mod_{q}", "same with exchanged operands") == pytest.approx(np.mean(pairs))
        assert (np.mean(pairs) == 1) == ((P - 1) % q == 0)


def test_the_mean_chance_over_all_primes_is_the_published_one():
    """6.3%: over the 29 primes below 113."""
    assert value(data("miiii").frame, "all answers", "chance accuracy") == pytest.approx(0.063, abs=5e-4)


def test_the_high_digit_first_is_drawn_as_it_stands_in_the_tokens():
    shown = data("miiii", {"p": P, "digits": "high-first", "primes": [3]}).data["inputs"]
    x1, x0 = np.indices((P, P))
    assert list(shown.axes) == ["x1", "x0"]
    assert np.array_equal(shown.answers["mod_3"], (x0 + P * x1) % 3)


def test_shuffled_answers_are_those_of_the_table():
    plain, shuffled = (data("miiii", {"p": P, "variant": variant}) for variant in ("plain", "shuffled"))
    for q in (2, 3, 5, 7):
        one, other = (result.data["inputs"].answers[f"mod_{q}"] for result in (plain, shuffled))
        assert np.array_equal(np.bincount(one.flat), np.bincount(other.flat))
        assert (one != other).any()


def test_multiplication_is_drawn_over_exponents():
    shown = data("modular-multiplication", {"p": P}).data["inputs"]
    first, second = shown.tokens.values()
    assert shown.axes == {"a": P - 1, "b": P - 1}
    assert first[1, 0] * first[1, 0] % P == first[2, 0]
    # Along each diagonal the exponents add up to the same.
    assert len({shown.answers["product"][i, (5 - i) % (P - 1)] for i in range(P - 1)}) == 1
    assert np.array_equal(shown.answers["product"], first * second % P)


def test_matrices_and_how_much_of_them_is_hidden():
    result = data("matrix-completion", {"n": 4, "rank": 1}, samples=20, seed=3)
    batch = tasks.get("matrix-completion", n=4, rank=1).sample(20, seed=3)
    frame = result.frame
    assert value(frame, "targets", "mean") == pytest.approx(batch.targets.double().mean().item())
    assert value(frame, "targets", "share hidden") == batch.extras["hidden"].double().mean().item()
    assert set(frame["n"]) == {20}
    assert np.array_equal(result.data["matrices"].hidden[1].flatten(), batch.extras["hidden"][1].numpy())
    (shown,) = result.figures()
    assert shown.title == "Examples"
    crosses = np.array(shown.figure.data[1].text) == "×"
    assert np.array_equal(crosses, result.data["matrices"].hidden[1])


class Reversed(tasks.get("modular-addition", p=P).__class__):
    """Runs through its digits in another order."""

    def grid_axes(self):
        return tuple(GridAxis(axis.name, axis.values[::-1], axis.position) for axis in super().grid_axes())


def test_the_order_of_an_axis_is_the_tasks():
    shown = data(Reversed(p=P)).data["inputs"]
    assert shown.tokens["a"][0, 0] == P - 1
    assert torch.equal(torch.tensor(shown.answers["sum"][0]), (P - 1 + torch.arange(P - 1, -1, -1)) % P)
