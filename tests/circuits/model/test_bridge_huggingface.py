"""Everything of `circuits` on bridges around Hugging Face models, against forwards written by hand."""

import sys

import pytest
import torch

from circuits import CircuitsError, ablate, edit, intervene, lens, patch, prompts, run, sweep, transplant

families = pytest.importorskip("tests.circuits.families")

MAIN = ["gpt2", "neox", "pythia", "llama", "qwen2", "mistral", "gemma2"]
# The wrapped module computes attention itself.
DELEGATED = ["gptj", "opt", "bert"]
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(3, families.WORDS, (4, 7), generator=GENERATOR)
OTHER = torch.randint(3, families.WORDS, (4, 7), generator=GENERATOR)


def metric(output):
    return output[:, -1, 5] - output[:, -1, 6]


@pytest.fixture(params=MAIN)
def model(request, hf_model):
    return hf_model(request.param)


def uniform(site, layer, x):
    """Of head 0.1."""
    if (site, layer) == ("pattern", 0):
        x = x.clone()
        x[:, 1] = (x[:, 1] > 0) / (x[:, 1] > 0).sum(-1, keepdim=True)
    return x


def shows_nothing(module, query, *given, **options):
    return query.transpose(1, 2), None


def test_a_query_that_sees_no_key_leaves_the_tokens_numbers(hf_model):
    model, rows = hf_model("llama"), [[3, 4, 5, 6], [7, 8]]
    made = prompts(model, rows, "left")
    for output, real, row in zip(run(model, made), made.real, rows, strict=True):
        torch.testing.assert_close(output[real], run(model, [row])[0])


@pytest.mark.parametrize("name", DELEGATED)
def test_attention_without_a_softmax_is_refused(hf_model, name, monkeypatch):
    """Another's kernel shows no scores; and a softmax in the user's own hook is not taken for the model's."""
    if name != "gptj":  # It has one implementation.
        model = hf_model(name, fresh=True)
        modeling = sys.modules[type(model.original_model).__module__]
        monkeypatch.setitem(modeling.ALL_ATTENTION_FUNCTIONS, "another", shows_nothing)
        model.original_model.config._attn_implementation = "another"
        with pytest.raises(
            CircuitsError, match=r'blocks\.0\.attn: 0 softmaxes .*set_attn_implementation\("eager"\)'
        ):
            run(model, TOKENS, ablate.uniform("0.1"))
    model = hf_model(name)
    with pytest.raises(CircuitsError, match=r"2 softmaxes .* no softmax in a hook there"):
        run(model, TOKENS, edit("q.0", lambda x: x.softmax(-1)), ablate.uniform("0.1"))
    found, clean = run(model, TOKENS, ablate.uniform("0.1")), families.forward(model, TOKENS)
    expected = families.forward(model, TOKENS, uniform)
    assert float((expected - clean).abs().max()) > 1e-3 * float(clean.std())
    assert float((found - expected).abs().max()) <= 1e-5 * float((expected - clean).abs().max())


def test_a_failed_forward_leaves_no_edit_of_scores_behind(hf_model):
    model, divisors = hf_model("gptj"), iter([0, 1])
    expected = run(model, TOKENS, edit("scores.0", lambda x: 2 * x))
    fails_once = edit("z.0", lambda x: x * (1 / next(divisors)))
    with intervene(model, edit("scores.0", lambda x: 2 * x), fails_once), torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(TOKENS)
        torch.testing.assert_close(model(TOKENS), expected)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("name", MAIN)
def test_the_lens_adds_up(hf_model, name, mode):
    model = hf_model(name, mode)
    try:
        model(TOKENS)
    except RuntimeError:
        pytest.skip(f"this version does not process a {name} in float64")
    seen = lens(model, TOKENS)
    total = sum(seen.contributions.values()) + seen.constant
    cap = families.Form.of(model).last_cap
    total = total if cap is None else cap * torch.tanh(total / cap)
    assert float((total - seen.output).abs().max()) <= 1e-5 * float(seen.output.std())
    assert {"0.0", "1.3", "mlp_out.1"} <= set(seen.contributions)
    shares = lens(model, TOKENS, lambda output: output[:, -1, 5] - output[:, -1, 7], batch_size=1)
    assert float((sum(shares.shares.values()) - shares.metric).abs().max()) <= 1e-5 * float(seen.output.std())
    if cap is None:
        for name, part in seen.contributions.items():
            expected = part[:, -1, 5] - part[:, -1, 7]
            torch.testing.assert_close(shares.shares[name], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("gpt2", "embd_pdrop"),
        ("gptj", "embd_pdrop"),
        ("pythia", "hidden_dropout"),
        ("bert", "hidden_dropout_prob"),
    ],
)
def test_dropout_is_off_in_every_module_of_the_wrapped_model(hf_model, name, dropout):
    """The bridge does not register the model that it wraps: no module of its own holds the embeddings' dropout."""
    model = hf_model(name, **{dropout: 0.5})
    clean = model.eval()(TOKENS).detach()
    model.train()
    before = [module.training for module in model.original_model.modules()]
    assert all(before)
    assert not torch.equal(model(TOKENS), model(TOKENS))
    assert torch.equal(run(model, TOKENS), clean)
    frame = sweep(model, TOKENS, {"as it was": edit("z", torch.clone)}, metric).frame
    assert frame["effect"].tolist() == [0.0]
    assert [module.training for module in model.original_model.modules()] == before


def test_models_of_other_kinds_are_refused_in_one_line(hf_model, tmp_path):
    with pytest.raises(
        CircuitsError, match="GPT2LMHeadModel is a Hugging Face model, without hook points; a bridge"
    ):
        run(hf_model.plain("gpt2"), TOKENS)


def test_weights_that_are_columns_of_one_matrix_are_exchanged_and_put_back(hf_model):
    """The q, k and v of GPT-2: a write to one counts for all of them."""
    model, donor = hf_model("gpt2", fresh=True), hf_model("gpt2", seed=1)
    clean, before = run(model, TOKENS), {name: x.clone() for name, x in model.state_dict().items()}
    with intervene(model, transplant.weights(donor, "qkv")):
        changed = run(model, TOKENS, transplant.weights(donor, ["q", "o"]))
        mean = run(model, TOKENS, ablate.mean("0.1", OTHER))
    assert not torch.equal(changed, clean)
    assert not torch.equal(mean, clean)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(run(model, TOKENS), clean)


class Packed(torch.nn.Linear):
    """As a quantised model has them: a weight of whole numbers on one axis, unpacked when it is used."""

    def forward(self, x):
        return x @ (self.weight.reshape(self.out_features, -1).to(x) * self.scale).T


def test_packed_weights_are_edited_around_and_not_multiplied(hf_model):
    model = hf_model("llama", fresh=True)
    linear = model.blocks[1].attn.o.original_component
    linear.scale = linear.weight.detach().abs().max() / 127
    whole = (linear.weight.detach() / linear.scale).round().to(torch.int8)
    with torch.no_grad():
        linear.weight.copy_(whole * linear.scale)
    expected = sweep(model, TOKENS, {"1.2": ablate.zero("1.2")}, metric).frame["effect"]
    linear.__class__ = Packed
    linear.weight = torch.nn.Parameter(whole.reshape(-1, 1), requires_grad=False)
    found = sweep(model, TOKENS, {"1.2": ablate.zero("1.2")}, metric).frame["effect"]
    torch.testing.assert_close(*(torch.tensor(one.to_numpy()) for one in (found, expected)))
    for call in (
        lambda: run(model, TOKENS, patch.path("0.1", "output", OTHER)),
        lambda: patch.edges(model, TOKENS, OTHER),
        lambda: lens(model, TOKENS),
    ):
        with pytest.raises(CircuitsError, match=r"blocks.1.attn.o.weight is packed \(int8 \[768, 1\]\)"):
            call()


class Adapter(torch.nn.Module):
    """A linear map with a LoRA adapter beside it, as PEFT puts it into a model."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.lora_A = torch.nn.Linear(linear.in_features, 2, bias=False).to(linear.weight)
        self.lora_B = torch.nn.Linear(2, linear.out_features, bias=False).to(linear.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

    def merged(self):
        self.base_layer.weight.data += self.lora_B.weight @ self.lora_A.weight
        return self.base_layer


def test_adapters_act_and_what_needs_the_weight_in_their_place_is_refused(hf_model):
    from transformer_lens.model_bridge import TransformerBridge

    def bridge():
        shared = {"hf_model": plain, "dtype": torch.float64, "device": "cpu"}
        return TransformerBridge.boot_transformers(str(hf_model.folder("llama")), **shared)

    plain = hf_model.plain("llama")
    adapters = [Adapter(layer.self_attn.q_proj) for layer in plain.model.layers]
    for layer, adapter in zip(plain.model.layers, adapters, strict=True):
        layer.self_attn.q_proj = adapter
    model, edits = bridge(), (ablate.zero("0.1"), patch.activations("q.1", OTHER))
    assert torch.allclose(run(model, TOKENS), plain(TOKENS).logits, atol=1e-10)
    edited = run(model, TOKENS, *edits)
    for call in (
        lambda: run(model, TOKENS, patch.path("0.1", ("q", "1.0"), OTHER)),
        lambda: transplant.weights(model, "qkv"),
        lambda: run(model, TOKENS, transplant.weights(hf_model("llama"), "qkv")),
    ):
        with pytest.raises(CircuitsError, match=r"merge them \(merge_and_unload\), then make the bridge"):
            call()
    for layer, adapter in zip(plain.model.layers, adapters, strict=True):
        layer.self_attn.q_proj = adapter.merged()
    assert torch.allclose(run(bridge(), TOKENS, *edits), edited, atol=1e-10)
