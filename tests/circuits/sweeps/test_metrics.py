import numpy as np
import pytest
import torch

from circuits import (
    CircuitsError,
    Prompts,
    ablate,
    circuit,
    compare,
    edit,
    logit_difference,
    patch,
    run,
    sweep,
)

ENGINES = ("auto", "naive")


def test_infinite_logits_are_compared_where_they_move(family, make_model, tokens):
    """A bias of minus infinity rules a token out, before and after the edit."""
    model = make_model(family=family)
    model.add_hook("unembed.hook_out", _rule_out)
    clean, edited = run(model, tokens), run(model, tokens, ablate.zero("0.1"))
    assert bool(clean[..., 4].isneginf().all())
    frame = sweep(model, tokens, {"zero": ablate.zero("0.1")}).frame.set_index("metric")
    rest = [token for token in range(11) if token != 4]
    p, q = (logits[..., rest].softmax(-1) for logits in (clean, edited))
    np.testing.assert_allclose(frame["value"]["kl"], (p * (p / q).log()).sum(-1).mean())
    np.testing.assert_allclose(
        frame["value"]["mse"], (clean - edited)[..., rest].square().sum(-1).mean() / 11
    )


def test_an_output_of_width_one_is_a_number_of_which_errors_are_squared():
    frame = compare([(torch.zeros(2, 3, 1), {"two": torch.full((2, 3, 1), 2.0)})]).frame
    assert frame[["metric", "value"]].to_numpy().tolist() == [["mse", 4.0]]


def test_a_type_error_inside_a_metric_is_its_own(causal, tokens):
    with pytest.raises(TypeError, match="unsupported operand"):
        sweep(causal, tokens, ablate.zero("0.1"), lambda output: output + "a")


def _rule_out(logits, hook):
    logits[..., 4] = -torch.inf
    return logits


def test_logit_difference_of_given_answers():
    output = torch.arange(24.0).reshape(2, 3, 4) ** 2
    assert logit_difference([1, 2], [0, 3])(output).tolist() == [9.0**2 - 8.0**2, 22.0**2 - 23.0**2]
    assert logit_difference(1, np.array([0, 3]), position=0)(output).tolist() == [1.0, 13.0**2 - 15.0**2]
    # A position for each example, and several tokens of one answer, of whose logits the mean is taken.
    found = logit_difference([[1, 2, 3], [0]], [[0]], position=[0, -2])(output)
    assert found.tolist() == pytest.approx([(1 + 4 + 9) / 3 - 0, 0.0])
    assert repr(logit_difference(3, 0)) == "logit_difference: all examples, 3 - 0 at position -1"
    many_answers = logit_difference([" Mary"] * 1000, [" John"] * 1000)
    assert repr(many_answers) == "logit_difference: 1000 examples, the first ' Mary' - ' John' at position -1"
    assert logit_difference(3, 0) == logit_difference([3], torch.tensor([0]), np.array([-1]))
    # With padding, positions are those of the prompts.
    made = Prompts(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [0, 1, 1]]))
    assert logit_difference(1, 0)(output, made).tolist() == [25.0 - 16.0, 21.0**2 - 20.0**2]
    assert logit_difference(1, 0, 0)(output, made).tolist() == [1.0, 17.0**2 - 16.0**2]
    with pytest.raises(CircuitsError, match="no position 2 in example 0, which has 2 tokens"):
        logit_difference(1, 0, 2)(output, made)


def test_positions_that_a_metric_does_not_name_are_nan_in_every_verb(make_model, tokens):
    model, other = make_model(0), tokens.flip(0)

    def honest(output):
        return output[:, -1, 3] - output[:, -1, 4]

    def broken(output):
        return output[:, 0, 3]

    def masked(output):
        return honest(output)

    honest.read_positions = broken.read_positions = (-1,)
    masked.read_positions = torch.ones(8, 6, dtype=torch.bool)
    few = {"draws": 5, "flips": 5}
    verbs = (
        lambda metric: sweep(model, tokens, {"a": ablate.zero("0.1")}, metric, **few),
        lambda metric: patch.attribution(model, tokens, other, metric, **few),
        lambda metric: patch.screen(model, tokens, other, metric, exact=1, **few),
        lambda metric: patch.edges(model, tokens, other, metric, exact=1, **few),
        lambda metric: circuit.evaluate(
            model, circuit.nodes(["0.1"]), tokens, other, metric, random=1, draws=5
        ),
    )
    for verb in verbs:
        assert len(verb(honest).frame)
        with pytest.raises(CircuitsError, match=r"metric broken, .*: not finite for 8 of 8 examples"):
            verb(broken)
        with pytest.raises(
            CircuitsError, match=r"same positions are read in every example; got a mask \[batch pos\]"
        ):
            verb(masked)


def test_a_metric_that_writes_to_what_it_is_given(make_model, tokens):
    """Its rows of the batch and the output are copies."""
    model, given = make_model(0), {"a": ablate.zero("0.1"), "b": ablate.zero("1.2")}
    batch = torch.utils.data.TensorDataset(torch.ones(len(tokens)))

    def gentle(output, rows):
        return output.square().flatten(1).sum(1) * rows[0]

    def writes(output, rows):
        values = gentle(output, rows)
        rows[0].add_(1)
        output += 100
        return values

    for engine in ENGINES:
        found, expected = (sweep(model, tokens, given, m, batch, engine=engine) for m in (writes, gentle))
        assert found.frame["value"].tolist() == expected.frame["value"].tolist()
    outputs = {name: run(model, tokens, one) for name, one in given.items()}
    found = compare([(run(model, tokens), outputs)], writes, batch)
    assert found.frame["value"].tolist() == pytest.approx(expected.frame["value"].tolist())
    for verb in (patch.attribution, patch.edges):
        # An output that is written to after its square was taken has no gradient: on a copy it has none either.
        with pytest.raises(CircuitsError, match="metric writes has no gradient: one of the variables"):
            verb(model, tokens, tokens.flip(0), writes, batch=batch)
    assert bool((batch.tensors[0] == 1).all())


def written(model):
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_metric_that_writes_to_the_model_is_refused(make_model, tokens, engine):
    """Every later variant would run on another model."""
    model = make_model(0)

    def metric(output):
        written(model)
        return output.flatten(1).sum(1)

    with pytest.raises(CircuitsError, match=r"^metric: it has written to the model's weights") as caught:
        sweep(model, tokens, {"a": ablate.zero("0.1")}, metric=metric, engine=engine)
    assert "\n" not in str(caught.value)

    def function(x):
        written(model)
        return x

    refused = r"edit\(z.1\), the function: it has written to the model's weights"
    # An edit's function is called between two variants, too.
    given = {"a": edit("z.1", function), "b": ablate.zero("0.1")}
    with pytest.raises(CircuitsError, match=refused):
        sweep(model, tokens, given, engine=engine)
    with pytest.raises(CircuitsError, match=refused):
        run(model, tokens, given["a"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_metric_of_a_half_precision_model_is_computed_in_single(make_model, tokens, dtype, untyped):
    """The difference of two logits near each other has one digit in bfloat16, and all of theirs in float32."""
    model = make_model().to(dtype)

    def margin(output):
        assert output.dtype == torch.float32
        return output[:, -1, 0] - output[:, -1, 1]

    expected = run(model, tokens)[:, -1].float()
    frame = sweep(model, tokens, {"none": ablate.zero("0.0")}, metric=margin).frame
    difference = float((expected[:, 0] - expected[:, 1]).mean())
    assert abs(float(frame["baseline"].iloc[0]) - difference) < 1e-6
    found = patch.attribution(model, tokens, tokens.roll(1, 0), margin)
    assert abs(float(found.frame["baseline"].iloc[0]) - difference) < 1e-6


def test_several_metrics_by_name_are_each_alone_and_get_copies(causal, tokens):
    def spoils(output, ids):
        output[:] = 0
        ids[:] = 0
        return output[:, 0, 0]

    def first(output, ids):
        return output[:, -1].gather(1, ids[:, :1])[:, 0]

    def two(output, ids):
        return {"low": output[:, -1].amin(1), "ids": ids[:, 0].double()}

    answers = logit_difference(tokens[:, 1].tolist(), 9, position=2)
    several = {"spoils": spoils, "difference": answers, "first": first, "two": two}
    variants = {"zero": ablate.zero("0.1"), "uniform": ablate.uniform("1.0")}
    found = sweep(causal, tokens, variants, several, tokens, batch_size=3)
    assert found.metrics == ["spoils", "difference", "first", "two low", "two ids"]
    for name, one, batch in (("difference", answers, None), ("first", first, tokens)):
        alone = sweep(causal, tokens, variants, one, batch, batch_size=3).frame
        rows = found.of_metric(name).frame
        for column in ("value", "effect", "effect_ci_low", "p_value"):
            np.testing.assert_allclose(rows[column], alone[column], err_msg=name)
    two_answers = {"there": answers, "last": logit_difference(1, 2)}
    assert sweep(causal, tokens, variants, two_answers, draws=9).settings["positions"] == [2, -1]
    outputs = run(causal, tokens), {"zero": run(causal, tokens, variants["zero"])}
    given = compare([outputs], several, tokens).of_metric("difference").frame
    zero = found.of_metric("difference").frame
    np.testing.assert_allclose(given["effect"], zero["effect"][zero["variant"] == "zero"])
    screened = patch.attribution(causal, tokens, tokens.flip(0), {"d": answers, "first": first}, batch=tokens)
    assert screened.metrics == ["d", "first"]
