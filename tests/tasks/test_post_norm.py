"""Post-norm models: against the BERT of ``transformers``, sum by sum, and what tells them from pre-norm ones."""

import pytest
import torch

import tasks

TINY = {"n_layers": 3, "n_heads": 2, "d_model": 8, "norm": "post", "normalization": "LN"}


def built(name="matrix-completion", **settings):
    """A task, a float64 model of it whose every parameter is drawn, and tokens."""
    task = tasks.get(name, **({"n": 3, "rank": 1} if name == "matrix-completion" else {}))
    model = task.build_model(0, task.Model(**{**TINY, **settings})).double()
    model.cfg.dtype = torch.float64
    stream = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.5 * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
    return task, model, task.sample(5, seed=0).tokens


def bert_of(model):
    """The published architecture in its own library, with the same weights."""
    from transformers import BertConfig, BertModel

    cfg = model.cfg
    config = BertConfig(
        vocab_size=cfg.d_vocab,
        hidden_size=cfg.d_model,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        intermediate_size=cfg.d_mlp,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=cfg.n_ctx,
        type_vocab_size=1,
        layer_norm_eps=1e-12,
    )
    bert = BertModel(config, add_pooling_layer=False).double().eval()
    own = dict(model.named_parameters())
    theirs = {
        "embeddings.word_embeddings.weight": own["embed.W_E"],
        "embeddings.position_embeddings.weight": own["pos_embed.W_pos"],
        "embeddings.token_type_embeddings.weight": torch.zeros(1, cfg.d_model),
        "embeddings.LayerNorm.weight": own["ln_embed.w"],
        "embeddings.LayerNorm.bias": own["ln_embed.b"],
    }
    for layer in range(cfg.n_layers):
        here, there = f"blocks.{layer}", f"encoder.layer.{layer}"
        for ours, name in (("Q", "query"), ("K", "key"), ("V", "value")):
            # [head d_model d_head] -> [head * d_head, d_model]
            weight = own[f"{here}.attn.W_{ours}"].transpose(1, 2).reshape(-1, cfg.d_model)
            theirs[f"{there}.attention.self.{name}.weight"] = weight
            theirs[f"{there}.attention.self.{name}.bias"] = own[f"{here}.attn.b_{ours}"].reshape(-1)
        out = own[f"{here}.attn.W_O"].reshape(-1, cfg.d_model)
        theirs[f"{there}.attention.output.dense.weight"] = out.T
        theirs[f"{there}.attention.output.dense.bias"] = own[f"{here}.attn.b_O"]
        for ours, name in (("ln1", "attention.output"), ("ln2", "output")):
            theirs[f"{there}.{name}.LayerNorm.weight"] = own[f"{here}.{ours}.w"]
            theirs[f"{there}.{name}.LayerNorm.bias"] = own[f"{here}.{ours}.b"]
        for ours, name in (("in", "intermediate"), ("out", "output")):
            theirs[f"{there}.{name}.dense.weight"] = own[f"{here}.mlp.W_{ours}"].T
            theirs[f"{there}.{name}.dense.bias"] = own[f"{here}.mlp.b_{ours}"]
    assert set(theirs) == {name for name, _ in bert.named_parameters()}
    bert.load_state_dict({name: value.detach() for name, value in theirs.items()}, strict=False)
    return bert


def test_it_is_bert():
    """Layer by layer and at the read-out, the library's own BERT in float64."""
    _, model, tokens = built()
    with torch.no_grad():
        theirs = bert_of(model)(tokens, output_hidden_states=True)
        output, cache = model.run_with_cache(tokens)
    ours = [cache["blocks.0.hook_resid_pre"]]
    ours += [cache[f"blocks.{layer}.hook_normalized_resid_post"] for layer in range(3)]
    for own, their in zip(ours, theirs.hidden_states, strict=True):
        torch.testing.assert_close(own, their, rtol=0, atol=1e-12)
    read_out = theirs.last_hidden_state @ model.unembed.W_U + model.unembed.b_U
    torch.testing.assert_close(output, read_out, rtol=0, atol=1e-12)
    assert output.std() > 0.1


@pytest.mark.parametrize("name", tasks.list())
def test_pre_norm_settings_are_written_as_before_there_was_a_choice(name):
    """So that older runs and grids, which do not name it, are the same runs."""
    settings = tasks.get(name).Model
    assert "norm" not in settings().model_dump(mode="json")
    post = settings(norm="post", normalization="LN")
    assert post.model_dump(mode="json")["norm"] == "post"
    for one in (settings(), post):
        assert settings(**one.model_dump(mode="json")) == one
