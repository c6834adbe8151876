"""``interp-run tasks data``: answers of a few tasks against arithmetic by hand; what is refused."""

import numpy as np
import pytest
import torch

import tasks
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.experiments import COLUMNS, data
from tasks import GridAxis

P = 11


def value(frame, variant, metric):
    (found,) = frame.loc[(frame["variant"] == variant) & (frame["metric"] == metric), "value"]
    return found


def test_the_grid_and_its_answers_are_arithmetic():
    result = data("miiii", {"p": P})
    shown = result.inputs
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
    shown = data("miiii", {"p": P, "digits": "high-first", "primes": [3]}).inputs
    x1, x0 = np.indices((P, P))
    assert list(shown.axes) == ["x1", "x0"]
    assert np.array_equal(shown.answers["mod_3"], (x0 + P * x1) % 3)


def test_shuffled_answers_are_those_of_the_table():
    plain, shuffled = (data("miiii", {"p": P, "variant": variant}) for variant in ("plain", "shuffled"))
    for q in (2, 3, 5, 7):
        one, other = (result.inputs.answers[f"mod_{q}"] for result in (plain, shuffled))
        assert np.array_equal(np.bincount(one.flat), np.bincount(other.flat))
        assert (one != other).any()


def test_multiplication_is_drawn_over_exponents():
    shown = data("modular-multiplication", {"p": P}).inputs
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
    assert np.array_equal(result.matrices.hidden[1].flatten(), batch.extras["hidden"][1].numpy())
    assert list(result.views()) == ["Examples"]
    crosses = np.array(result.views()["Examples"].data[1].text) == "×"
    assert np.array_equal(crosses, result.matrices.hidden[1])


def test_the_pictures():
    views = data("miiii", {"p": P}, multiples=[17]).views()
    assert list(views) == ["Polar plot", "Inputs (X)", "Answers (Y)", "DFT matrix"]
    polar = {trace.name: trace for trace in views["Polar plot"].data}
    for name, numbers in {
        "multiples of 17": [17, 34, 51, 68, 85, 102, 119],
        "primes": [2, 3, 5, 7, 11],
    }.items():
        of = np.array(numbers, float)
        assert np.allclose(np.array(polar[name].x, float)[: len(of)], of * np.cos(of))
        assert np.allclose(np.array(polar[name].y, float)[: len(of)], of * np.sin(of))
    matrix = views["DFT matrix"].data[0].z
    assert np.abs(matrix @ matrix.T - np.eye(P)).max() < 1e-6
    assert np.array_equal(views["Answers (Y)"].data[1].z, np.add.outer(np.arange(P), P * np.arange(P)) % 3)


class Bare(tasks.get("modular-addition", p=P).__class__):
    """Says nothing of its grid."""

    def grid_axes(self):
        return ()

    def modular_answers(self):
        return {}


class Silent(Bare):
    def probe_targets(self, batch):
        return tasks.ProbeTargets()

    def sample(self, n, seed=0, split="test"):
        batch = super().sample(n, seed, split)
        return type(batch)(batch.tokens, batch.targets[:, None] > 1)


@pytest.mark.parametrize("nothing", [None, 3, [], b"modular-addition"])
def test_what_is_no_task_is_refused_in_one_line(nothing):
    with pytest.raises(UserError, match="give the name of a task, or a task"):
        data(nothing)


def test_a_task_without_a_grid_has_numbers_and_no_picture():
    result = data(Bare(p=P), samples=30)
    assert value(result.frame, "sum", "classes") == len(Bare(p=P).sample(30).targets.unique())
    with pytest.raises(UserError, match="declares no grid of two coordinates"):
        result.plot()
    with pytest.raises(UserError, match="declares neither classes"):
        data(Silent(p=P))


class Reversed(tasks.get("modular-addition", p=P).__class__):
    """Runs through its digits in another order."""

    def grid_axes(self):
        return tuple(GridAxis(axis.name, axis.values[::-1], axis.position) for axis in super().grid_axes())


def test_the_order_of_an_axis_is_the_tasks():
    shown = data(Reversed(p=P)).inputs
    assert shown.tokens["a"][0, 0] == P - 1
    assert torch.equal(torch.tensor(shown.answers["sum"][0]), (P - 1 + torch.arange(P - 1, -1, -1)) % P)


def test_the_command(capsys, tmp_path):
    given = ["tasks", "data", "miiii", "--set", "task.p=11", "--multiples", "17,23"]
    assert main([*given, "--out", str(tmp_path), "--plot", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "121 grid examples" in out
    assert "0.5041" in out
    page = (tmp_path / "data.html").read_text()
    assert "multiples of 23" in page
    assert "DFT matrix" in page


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["miiiii"], "miiii"),
        (["miiii", "--multiples", "1"], "--multiples 1: give whole numbers from 2"),
        (["miiii", "--multiples", "1000000"], "--multiples 1000000: give whole numbers from 2 to 999999"),
        (["miiii", "--multiples", "a"], "write whole numbers"),
        (["miiii", "--set", "train.steps=3"], "sets the task's own settings"),
        (["miiii", "--set", "task.p=12"], "p must be prime"),
        (["miiii", "--samples", "0"], "at least one"),
        (["miiii", "--split", "all"], "--split"),
    ],
)
def test_faults_are_one_line(capsys, arguments, says):
    assert main(["tasks", "data", *arguments, "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1
