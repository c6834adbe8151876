import pytest
import torch

from circuits import CircuitsError, edit, run


def test_only_the_chosen_heads_and_positions_change(model, tokens, by_hand, assert_same):
    def double(z):
        z *= 2
        return z

    def by_index(s, at, x):
        x = x.clone()
        if (s, at) == ("z", 0):
            x[:, [0, 5], 2] *= 2
        return x

    found = run(model, tokens, edit("z", double, heads="0.2", positions=[0, 5]))
    assert_same(found, by_hand(model, tokens, by_index), model(tokens))


def test_steering_at_one_position(causal, tokens, by_hand, assert_same):
    direction = torch.linspace(-1, 1, 16, dtype=torch.float64)
    expected = by_hand(
        causal,
        tokens,
        lambda s, at, x: x + direction * torch.eye(6)[3][:, None] if (s, at) == ("resid_mid", 1) else x,
    )
    assert_same(
        run(causal, tokens, edit("resid_mid.1", lambda x: x + direction, positions=3)),
        expected,
        causal(tokens),
    )


def test_a_site_without_layer_is_every_layer(model, tokens, by_hand, assert_same):
    expected = by_hand(model, tokens, lambda s, at, x: x * 1.3 if s == "v" else x)
    assert_same(run(model, tokens, edit("v", lambda x: x * 1.3)), expected, model(tokens))


def test_heads_outside_the_sites_layer(causal, tokens):
    with pytest.raises(CircuitsError, match=r"not all in layer 1"):
        run(causal, tokens, edit("z.1", torch.zeros_like, heads="0.1,1.0"))
    all_of_one = run(causal, tokens, edit("z.1", torch.zeros_like, heads="all"))
    assert bool((all_of_one == run(causal, tokens, edit("z.1", torch.zeros_like))).all())


@pytest.mark.parametrize("function", [lambda x: x[0], lambda x: None, lambda x: 3.0, lambda x: x + 1j])
def test_a_result_of_another_shape_is_an_error(causal, tokens, function):
    with pytest.raises(CircuitsError, match=r"must return a tensor \[8, 6, 4, 4\]"):
        run(causal, tokens, edit("z.0", function))


def test_what_is_no_function():
    with pytest.raises(CircuitsError, match="fn must be a function"):
        edit("z", 3)


@pytest.mark.parametrize(
    ("function", "kind"), [(torch.Tensor.to_sparse, "sparse"), (lambda x: x.to("meta"), "meta")]
)
def test_a_result_without_values_is_an_error(causal, tokens, function, kind):
    with pytest.raises(CircuitsError, match=f"the function: got a {kind} tensor"):
        run(causal, tokens, edit("z.0", function))


def test_results_in_other_forms(causal, tokens):
    expected = run(causal, tokens, edit("z.0", lambda z: (z > 0).double()))
    for function in (lambda z: z > 0, lambda z: (z > 0).int(), lambda z: (z > 0).numpy()):
        assert bool((run(causal, tokens, edit("z.0", function)) == expected).all())
    assert not bool((expected == causal(tokens)).all())
