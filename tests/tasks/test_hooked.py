"""Initialised models: sizes, standard deviations, determinism, what trains and what does not."""

import math

import pytest
import torch

import tasks
from tasks.model_building import STD_OF_NORMAL_CUT_AT_2

TINY = {"n_layers": 1, "n_heads": 2, "d_model": 8}


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def is_bias(name):
    return name.split(".")[-1].startswith("b_")


def trainable(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", tasks.list())
def test_a_model_is_a_function_of_its_seed(name):
    task = tasks.get(name)
    settings = task.Model(**TINY)
    built = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        built.append(parameters(task.build_model(3, settings)))
    other = parameters(task.build_model(4, settings))
    for key, value in built[0].items():
        assert value.isfinite().all()
        assert torch.equal(value, built[1][key])
        if key.split(".")[-1].startswith("W"):
            assert not torch.equal(value, other[key]), key


@pytest.mark.parametrize(
    ("name", "config", "settings", "count"),
    [
        ("modular-addition", {}, {}, 226_048),
        ("modular-addition", {}, {"biases": "mlp"}, 226_048 + 640),
        ("modular-addition", {"equals_class": True}, {}, 226_048 + 128),
        ("miiii", {}, {}, 1_195_264),
        ("miiii", {}, {"d_model": 128}, 401_024),
    ],
)
def test_trainable_parameters_are_counted_as_published(name, config, settings, count):
    task = tasks.get(name, **config)
    assert trainable(task.build_model(0, task.Model(**settings))) == count


def assert_std(weights, expected):
    """5 standard errors of a sample standard deviation, σ/√(2N); a cut normal's is smaller than that."""
    n = weights.numel()
    assert abs(weights.double().std().item() - expected) <= 5 * expected / math.sqrt(2 * n)
    assert abs(weights.double().mean().item()) <= 5 * expected / math.sqrt(n)


def test_he_initialisation_has_the_fans_of_the_miiii_code():
    """MIIII's code at d 256, p 113, 29 primes: He's variance, a normal cut at two standard deviations."""
    model = tasks.get("miiii").build_model(0)
    fans = {"W_E": 114, "W_pos": 3, "W_Q": 4 * 256, "W_K": 4 * 256, "W_V": 4 * 256, "W_O": 256}
    fans |= {"W_in": 256, "W_out": 1024, "W_U": 29 * 256}
    printed = {"W_E": 0.132, "W_pos": 0.816, "W_Q": 0.0442, "W_K": 0.0442, "W_V": 0.0442, "W_O": 0.0884}
    printed |= {"W_in": 0.0884, "W_out": 0.0442, "W_U": 0.0164}
    seen = set()
    for name, weights in parameters(model).items():
        kind = name.split(".")[-1]
        if is_bias(name):
            assert (weights == 0).all()
            continue
        seen.add(kind)
        std = math.sqrt(2 / fans[kind])
        # The sheet prints three figures, some of them cut rather than rounded.
        assert std == pytest.approx(printed[kind], rel=5e-3)
        assert_std(weights, std)
        edge = 2 * std / STD_OF_NORMAL_CUT_AT_2
        assert 0.98 * edge < weights.abs().max() <= edge * (1 + 1e-6)
    assert seen == set(fans)
    one_task = tasks.get("modular-addition").build_model(0, tasks.get("miiii").Model())
    assert_std(one_task.unembed.W_U, math.sqrt(2 / 256))


@pytest.mark.parametrize(
    ("init", "stds"),
    [
        # N(0, 1/d_model), the unembedding N(0, 1/outputs) (code of Nanda et al. 2023).
        ("nanda", {"W_U": 99**-0.5, "": 64**-0.5}),
        ("normal", {"": 0.1}),
        # What writes into the residual stream smaller by 1/√(2 layers), as published for the autoregressive form.
        ("gpt2", {"W_O": 0.1 / math.sqrt(6), "W_out": 0.1 / math.sqrt(6), "": 0.1}),
    ],
)
def test_initialisation_has_its_standard_deviations_and_plain_layer_norms(init, stds):
    task = tasks.get("modular-multiplication", p=97, operator_token=True, equals_class=True)
    sizes = {"n_layers": 3, "n_heads": 4, "d_model": 64, "normalization": "LN"}
    model = task.build_model(0, task.Model(**sizes, init=init, init_std=0.1))
    for name, weights in parameters(model).items():
        kind = name.split(".")[-1]
        if kind == "w":
            assert (weights == 1).all()
        elif kind.startswith("b"):
            assert (weights == 0).all()
        else:
            assert_std(weights, stds.get(kind, stds[""]))
            assert weights.numel() < 1000 or weights.abs().max() > 2.5 * weights.std()


@pytest.mark.parametrize(
    ("biases", "training"),
    [
        ("frozen", set()),
        ("mlp", {"b_in", "b_out"}),
        ("trained", {"b_in", "b_out", "b_Q", "b_V", "b_O", "b_U"}),
    ],
)
@pytest.mark.parametrize("normalization", [None, "LN"])
def test_frozen_biases_stay_zero_and_the_others_learn(biases, training, normalization):
    """b_K moves only by rounding: a constant added to every key changes no softmax."""
    task = tasks.get("modular-addition", p=11)
    model = task.build_model(0, task.Model(**TINY, biases=biases, normalization=normalization))
    before = parameters(model)
    batch = task.sample(None, split="train")
    updates = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1.0, betas=(0.9, 0.98))
    for _ in range(3):
        updates.zero_grad()
        task.loss(model(batch.tokens), batch).backward()
        updates.step()
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-1]
        if not is_bias(name):
            assert parameter.requires_grad
            assert not torch.equal(parameter, before[name]), name
        elif kind != "b_K":
            assert parameter.requires_grad == (kind in training)
            assert (parameter != 0).any().item() == (kind in training), name
        elif biases != "trained":
            assert not parameter.requires_grad
            assert (parameter == 0).all()


def test_torch_initialisation_is_that_of_torchs_own_modules():
    """The largest and the mean square of each tensor against freshly made ``nn.Linear``, ``nn.MultiheadAttention``."""
    width, heads, vocabulary = 64, 4, 99
    task = tasks.get("modular-multiplication", p=97, operator_token=True, equals_class=True)
    settings = {"d_model": width, "n_heads": heads, "normalization": "LN", "init": "torch"}
    made = parameters(task.build_model(0, task.Model(**settings, biases="trained")))
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(width, heads)
    wide, narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
    theirs = {
        "embed.W_E": torch.nn.Embedding(vocabulary, width).weight,
        "pos_embed.W_pos": torch.nn.Embedding(500, width).weight,
        **{f"blocks.0.attn.W_{kind}": attention.in_proj_weight for kind in "QKV"},
        "blocks.0.attn.W_O": attention.out_proj.weight,
        "blocks.0.mlp.W_in": wide.weight,
        "blocks.0.mlp.W_out": narrow.weight,
        "unembed.W_U": torch.nn.Linear(width, vocabulary, bias=False).weight,
        "blocks.0.mlp.b_in": wide.bias,
        "blocks.0.mlp.b_out": narrow.bias,
    }
    for name, tensor in theirs.items():
        ours = made[name]
        # The standard deviation of the smallest, 64 numbers, is known to 1/√(2 · 64) = 9%: three times that.
        assert ours.std().item() == pytest.approx(tensor.detach().std().item(), rel=0.27), name
        if not name.startswith(("embed", "pos")):
            assert ours.abs().max().item() == pytest.approx(tensor.detach().abs().max().item(), rel=0.06), (
                name
            )
    assert not attention.in_proj_bias.any()
    assert not any(made[f"blocks.0.attn.b_{kind}"].any() for kind in "QKVO")
    frozen = parameters(task.build_model(0, task.Model(**settings)))
    assert not any(value.any() for name, value in frozen.items() if is_bias(name))
