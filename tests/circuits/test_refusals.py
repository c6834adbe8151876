"""Every call that `circuits` refuses is refused by a CircuitsError of one line that names what is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
except ImportError:
    pytest.skip("the installed transformer-lens has no HookedTransformer", allow_module_level=True)

from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.model_bridge import TransformerBridge

from circuits import (
    CircuitsError,
    Site,
    ablate,
    cache,
    compare,
    draws,
    edit,
    fourier,
    grid,
    heads,
    intervene,
    lens,
    logit_difference,
    patch,
    patterns,
    permute,
    plots,
    probe,
    prompts,
    run,
    sweep,
    transplant,
    variance,
)

SIZES = {"n_layers": 2, "n_heads": 4, "d_head": 4, "d_model": 16, "d_mlp": 24, "n_ctx": 6, "d_vocab": 11}
SETTINGS = {**SIZES, "act_fn": "relu", "initializer_range": 0.3, "seed": 0}


def build(kind: type[HookedTransformer] = HookedTransformer, **changes: Any) -> HookedTransformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return kind(HookedTransformerConfig(**{**SETTINGS, **changes}, device="cpu"))


def post_norm() -> Any:
    from tasks.post_norm import PostNormConfig, PostNormTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return PostNormTransformer(PostNormConfig(**SETTINGS, device="cpu"))


def native() -> TransformerBridge:
    return TransformerBridge.boot_native({**SETTINGS, "device": "cpu"})


model, donor = build(), build(seed=1)
tokens = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(0))
other = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(1))
hidden, ones = tokens > 4, torch.ones_like(tokens)
clean = run(model, tokens)
zero = {"0.1": ablate.zero("0.1")}
RESULT = "blocks.0.attn.hook_result"

# All inputs of a + b mod 5, and what is measured on them.
digits = torch.cartesian_prod(torch.arange(5), torch.arange(5))
square = torch.cat([digits, torch.full((25, 1), 10)], 1)
where = {"coords": [0, 1], "period": 5, "grid": square}
without_1 = ablate.frequencies("mlp_post.0", [1], **where)
remainder = digits.sum(1) % 3
of_twenty = ablate.classes("mlp_post.0", remainder[:20], square[:20])
post = torch.randn(25, 3, 24, generator=torch.Generator().manual_seed(2))
over_inputs = fourier.Grid.of_inputs(square, {"a": 0, "b": 1}, values=5)
spectrum = fourier.spectrum(post[:, -1], over_inputs)
answer = fourier.ModularSum(digits, (1, 1), 5)

templates = {"own": patterns.identity(6)}
scores = patterns.scores(model, tokens, templates)
column = torch.tensor([0, 1, 2, 0, 1, 2])
here, there = torch.zeros(8, dtype=torch.long), torch.ones(8, dtype=torch.long)
first_half = torch.zeros(8, 6, dtype=torch.bool)
first_half[:4] = True
table = pd.DataFrame({"layer": [0, 0], "head": [0, 1], "value": [0.5, 0.2]})


def double(activation):
    return 2 * activation


def logit(output):
    return output[:, -1, 3]


def mean(output):
    return logit(output).mean()


def accuracy(output):
    return (output[:, -1].argmax(-1) == 3).float()


def in_numpy(output: torch.Tensor) -> Any:
    return output.numpy()[:, -1, 3]


def overwritten(output):
    squares = output[:, -1].square().sum(-1)
    output *= 2
    return squares


def not_finite(output):
    return (0 * logit(output)).sqrt()


def masked(output):
    return logit(output)


masked.read_positions = torch.ones(8, 6, dtype=torch.bool)


def changing(*values: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A metric that returns something else each time."""
    calls = iter(values)
    return lambda output: {name: value(output) for name, value in next(calls).items()}


class Lookalike(torch.nn.Module):
    """Has a config and hook points, as other classes of TransformerLens do."""

    def __init__(self):
        super().__init__()
        self.cfg, self.blocks, self.hook_embed = model.cfg, model.blocks, model.hook_embed


class Loss(HookedTransformer):
    def forward(self, *args, **kwargs):
        return {"loss": super().forward(*args, **kwargs)}


def some_blocks_post_norm():
    half = post_norm()
    half.hook_dict.pop("blocks.1.hook_normalized_resid_post")
    run(half, tokens)


def some_blocks_parallel():
    half = build()
    half.hook_dict.pop("blocks.1.hook_resid_mid")
    run(half, tokens)


def one_norm_module():
    shared = build(parallel_attn_mlp=True)
    shared.blocks[1].ln2 = shared.blocks[1].ln1
    run(shared, tokens, patch.path("embed", "mlp_pre.1", other))


def from_hugging_face():
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformers import GPT2Config, GPT2LMHeadModel

    # The bridge scales the scores, whatever this says.
    gpt2 = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6, scale_attn_weights=False)
    run(build_bridge_from_module(GPT2LMHeadModel(gpt2), "GPT2LMHeadModel", hf_config=gpt2), tokens)


def altered_attention():
    bridge = native()
    attention = bridge.blocks[0].attn.original_component

    class NativeAttention(type(attention)):
        def forward(self, hidden_states, attention_mask=None, **rest):
            mask = torch.ones(hidden_states.shape[:2], dtype=torch.long)
            mask[:, 2] = 0
            return super().forward(hidden_states, attention_mask=mask, **rest)

    attention.__class__ = NativeAttention
    run(bridge, tokens, ablate.uniform("0.1"))


def cancelled_stream():
    large = native()
    with torch.no_grad():
        large.pos_embed.weight.mul_(1e5)
    run(large, tokens, ablate.zero("resid_mid.0"))


def pick(output, batch):
    return output[:, -1].gather(1, batch[:, :1])[:, 0]


def padding_of_the_tokenizer():
    padding = build()
    padding.tokenizer = SimpleNamespace(pad_token_id=10, padding_side="right")
    ragged = tokens.clamp(max=9)
    ragged[:3, 4:] = 10
    run(padding, tokens, ablate.mean("z", reference=ragged, over="batch,pos"))


def call_with(intervention: Any, **given: Any) -> None:
    with intervene(model, intervention):
        model(tokens, **given)


def padded() -> torch.Tensor:
    keep = ones.clone()
    keep[:3, :2] = 0
    return keep


def key_value_cache() -> dict[str, Any]:
    empty = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(tokens))
    return {"past_kv_cache": empty, "attention_mask": ones}


def block_of_no_run():
    with intervene(model, ablate.zero("0.1")):
        pass


def part_of_the_model(*interventions: Any) -> None:
    with intervene(model, *interventions):
        model.blocks[0](model.W_E[square])


def call_on_embeddings(intervention: Any) -> None:
    with intervene(model, intervention):
        model(model.W_E[square], start_at_layer=0)


def second_block(intervention: Any) -> None:
    with intervene(model, intervention):
        model.blocks[1](torch.zeros(8, 6, 16))


def hook_around_a_forward():
    inner = []

    def look_up(z, hook):
        if not inner:
            inner.append(True)
            model.run_with_hooks(other)
            inner.clear()

    with model.hooks([("blocks.0.attn.hook_z", look_up)]), intervene(model, ablate.zero("0.1")):
        model(tokens)


def another_thread():
    raised = []

    def forward():
        try:
            model(tokens)
        except CircuitsError as error:
            raised.append(error)

    with intervene(model, ablate.zero("0.1")):
        model(tokens)
        thread = Thread(target=forward)
        thread.start()
        thread.join()
    (error,) = raised
    raise error


def thread_that_has_ended():
    own = build()
    block = intervene(own)
    thread = Thread(target=block.__enter__)
    thread.start()
    thread.join()
    try:
        run(own, tokens)
    finally:
        block.__exit__(None, None, None)


def hook_before_a_receiver():
    split = build(use_split_qkv_input=True)
    split.add_hook("blocks.1.hook_q_input", lambda x, hook: x.tanh())
    run(split, tokens, patch.path("0.1", ("q", "1.0"), source=other))


def made_for_inference():
    with torch.inference_mode():
        fixed = build()
    run(fixed, tokens, transplant.weights(donor, "mlp"))


def gradients_of_one_made_for_inference(call):
    with torch.inference_mode():
        fixed = build()
    call(fixed, tokens, other)


def tied_embeddings():
    tied = build()
    tied.unembed.W_U = torch.nn.Parameter(tied.embed.W_E.data.T)
    run(tied, tokens, transplant.weights(donor, "embed"))


def loaded_inside_a_block():
    own = build()
    with intervene(own, transplant.weights(donor, "qkv")):
        own.load_state_dict(donor.state_dict())


def sweep_inside_a_transplant():
    with intervene(model, transplant.weights(donor, "mlp")):
        sweep(model, tokens, zero, checkpoints={4000: donor.state_dict()})


def screen_inside_a_block():
    with intervene(model, ablate.zero("0.1")):
        try:
            patch.edges(model, tokens, other, metric=logit)
        finally:
            model(tokens)


def read_out_of_its_own():
    bent = build()
    bent.unembed.register_forward_hook(lambda module, inputs, output: output.tanh())
    lens(bent, tokens)


def norm_of_its_own():
    bent = build(normalization_type="RMS", use_normalization_before_and_after=True)
    bent.blocks[0].ln1_post.register_forward_hook(lambda module, inputs, output: output.tanh())
    lens(bent, tokens)


def hook_on_the_stream():
    steered = build()
    steered.add_hook("blocks.0.hook_resid_post", lambda x, hook: x + 1)
    lens(steered, tokens)


def skipped_attention():
    skipping = build()
    skipping.blocks[1].forward = lambda residual, **rest: residual
    patterns.attention(skipping, tokens)


def silent_output():
    silent = build()
    silent.register_forward_hook(lambda module, inputs, output: (output,))
    patch.attribution(silent, tokens, other, metric=logit)


def folder_for_a_file():
    Path("figures.html").mkdir(exist_ok=True)
    plots.save(scores.plot(), "figures.html")


def checkpoint(state: Any, of: Any = model) -> None:
    sweep(of, tokens, zero, checkpoints={4000: state})


def rotary(**changes: Any) -> HookedTransformer:
    return build(positional_embedding_type="rotary", **changes)


def attribute(source: Any = other, metric: Any = logit, of: Any = model, **given: Any) -> None:
    patch.attribution(of, tokens, source, metric=metric, **given)


def linear(targets: Any = tokens / 1, **given: Any) -> None:
    probe.linear(model, tokens, targets, **given)


def frequencies(keys: Any = (1,), **changes: Any) -> None:
    ablate.frequencies("mlp_post.0", keys, **{**where, **changes})


# What is called, and words that the message must have.
REFUSALS: list[tuple[Any, ...]] = [
    # The model.
    (lambda: run("gpt2-small", tokens), "hooked model", "got str"),
    (lambda: run(torch.nn.Linear(2, 2), tokens), "Linear", "cfg.n_layers"),
    (lambda: run(Lookalike(), tokens), "Lookalike", "not supported"),
    (some_blocks_post_norm, "blocks 0 and 1 differ"),
    (some_blocks_parallel, "blocks 1 and 0 differ", "in parallel"),
    (one_norm_module, "blocks.1: ln1 and ln2 are one module", "give each its own"),
    (
        lambda: run(build(positional_embedding_type="shortformer"), tokens),
        "positional_embedding_type='shortformer'",
    ),
    (lambda: run(build(gated_mlp=True, act_fn="solu_ln"), tokens), "gated_mlp", "act_fn='solu_ln'"),
    (from_hugging_face, "GPT2LMHeadModel", "was not tested"),
    (altered_attention, "rebuilt from q, k and v"),
    (cancelled_stream, "too few digits"),
    # Heads.
    (lambda: ablate.all_but("0.k1, 1.0", "zero"), "ablated at z", "no key-value group 0.k1"),
    (
        lambda: patch.activations("z", tokens, positions="prompt", source_positions=[0]),
        "patch.activations",
        "paired with numbers, got positions=prompt",
    ),
    (lambda: heads("head 3", model), "'head 3' as a head"),
    (lambda: heads([3], model), "3 as a head"),
    (lambda: heads([0, 3], model), "0 as a head"),
    (lambda: heads("0.3-1", model), "'0.3-1'", "range of heads"),
    (lambda: heads([], model), "heads []", "empty"),
    (lambda: heads(None, model), "heads None", "head spec"),
    (lambda: heads("2.0", model), "no head 2.0", "layers 0-1", "heads 0-3"),
    (lambda: ablate.uniform("head 3"), "ablate.uniform", "'head 3' as a head"),
    (lambda: edit("attn_out.0", double, heads="0.1"), "attn_out.0", "no head axis"),
    (lambda: edit("z", double, neurons=[0, 1]), "site z", "no neurons"),
    (lambda: run(model, tokens, edit("z.0", double, heads="1.1")), "heads 1.1", "layer 0", "z.0"),
    (
        lambda: run(build(n_key_value_heads=2), tokens, edit("v", double, heads="0.1")),
        "head 0.1 shares key-value group 0.k0",
        "write 0.k0",
    ),
    (
        lambda: run(build(n_key_value_heads=2), tokens, ablate.zero("0.k1")),
        "key-value group 0.k1 is at k and v only",
        "heads 0.2,0.3",
    ),
    (lambda: heads("0.k1", model), "no key-value group 0.k1", "write 0.1"),
    (lambda: heads("0.k3", build(n_key_value_heads=2)), "no key-value group 0.k3", "groups 0-1"),
    # Sites.
    (lambda: edit("resid_middle", double), "'resid_middle'", "resid_mid"),
    (lambda: edit(3, double), "not a site: 3"),
    (lambda: Site(3), "not a site: 3"),
    (lambda: Site("z", layer="1"), "site 'z'", "layer='1'"),
    (lambda: edit("embed.1", double), "'embed'", "no layer 1"),
    (lambda: Site("blocks.0.attn.hook_z", layer=1), "blocks.0.attn.hook_z", "layer 0, not 1"),
    (lambda: run(model, tokens, edit("z.2", double)), "z.2", "layers 0-1"),
    (lambda: run(model, tokens, ablate.zero(2)), "ablate.zero", "z.2", "layers 0-1"),
    (lambda: run(build(attn_only=True), tokens, edit("mlp_out", double)), "no site mlp_out", "embed"),
    (
        lambda: run(native(), tokens, edit("blocks.0.ln1.hook_normalized", double)),
        "not qualified for writing",
        "TransformerBridge",
    ),
    (lambda: ablate.zero(True), "heads, a site or a layer", "True"),
    # Positions and masks.
    (lambda: ablate.zero("0.1", positions=1.5), "boolean mask [batch pos]", "(1.5,)"),
    (lambda: ablate.zero("0.1", positions=[]), "no position given"),
    (lambda: run(model, tokens, ablate.zero("0.1", positions=9)), "no position 9", "0-5"),
    (lambda: ablate.zero("0.1", queries=1), "ablate.zero", "queries=", "positions="),
    (lambda: ablate.zero("0.1", positions=hidden.long()), "one list for all examples", "boolean"),
    (lambda: ablate.zero("0.1", positions=hidden[0].int()), "6 numbers", "mask [pos]", "numbers 0 and 1"),
    (lambda: ablate.uniform("all", positions=hidden[:, :, None]), "[batch pos]", "[8, 6, 1]"),
    (lambda: ablate.uniform("all", positions=tokens > 99), "[8, 6]", "selects nothing"),
    (lambda: run(model, tokens[:4], ablate.uniform("all", positions=hidden)), "[8, 6]", "[4, 6]"),
    (
        lambda: run(model, tokens, ablate.uniform("all", positions=torch.ones(3).bool())),
        "[pos] = [3]",
        "6 positions",
    ),
    (lambda: ablate.uniform("all", keys=hidden), "keys are positions", "mask [8, 6]"),
    # Tokens, references, sources.
    (lambda: run(model, "some text"), "run: the model has no tokenizer, which texts need"),
    (lambda: patch.activations("z", source=tokens[0]), "patch.activations: source", "got [6]"),
    (lambda: run(model, tokens / 1), "run: tokens", "whole numbers", "float32"),
    (lambda: run(model, tokens > 4), "run: tokens", "whole numbers", "bool"),
    (
        lambda: run(model, tokens, ablate.mean("0.1", reference=tokens - 1)),
        "reference or source tokens are -1 to 9",
        "ids 0-10",
    ),
    (lambda: run(model, torch.cat([tokens, other], 1)), "[8, 12]", "6 positions"),
    (lambda: run(model, tokens.to_sparse()), "run: tokens", "sparse"),
    (lambda: run(model, tokens.numpy().astype(str)), "run: tokens", "<U21"),
    (lambda: run(native(), torch.ones(8, 6, 15)), "vectors [8, 6, 15]", "16 entries"),
    (lambda: ablate.resample("0.1", source=tokens[:1]), "source", "2 examples", "[1, 6]"),
    (
        lambda: run(model, tokens[:4], ablate.resample("0.1", source=tokens)),
        "batch of 8",
        "batch of 4",
    ),
    (
        lambda: run(model, tokens, patch.activations("z", source=other[:3])),
        "source [3, 6, 4, 4]",
        "batch of 8",
    ),
    (
        lambda: run(model, tokens, ablate.mean("0.1", reference=tokens[:, :5])),
        "reference is [1, 5, 4, 4]",
        "run [8, 6, 4, 4]",
    ),
    (
        lambda: ablate.mean_pattern("all", tokens, of="edited", positions=tokens[:4] > 3),
        'of="edited"',
        "[8, 6]",
        "[4, 6]",
    ),
    (
        lambda: patch.activations("z", cache(model, other, "z.1"), heads="0.1"),
        "no blocks.0.attn.hook_z",
        "has blocks.1.attn.hook_z",
    ),
    (
        lambda: run(model, tokens, patch.activations("z", cache(model, other, "z.1"), heads="all")),
        "no blocks.0.attn.hook_z",
        "has blocks.1.attn.hook_z",
    ),
    (
        lambda: patch.activations("scores", native().run_with_cache(other)[1]),
        "patterns where scores should be",
    ),
    (
        lambda: patch.activations("z.0", {"blocks.0.attn.hook_z": [[1.0]]}),
        "blocks.0.attn.hook_z is list",
        "tensor",
    ),
    (lambda: ablate.resample("0.1", source=tokens, seed=-1), "seed=-1", "2**63"),
    (lambda: ablate.mean("0.1", reference=tokens, over="pos"), "over='pos'", "'batch,pos'"),
    (lambda: transplant.weights(model, "mlp", layers=-1), "layers", "whole numbers from 0", "(-1,)"),
    (padding_of_the_tokenizer, "reference", "3 of 8 examples have padding"),
    (
        lambda: call_with(patch.activations("z", source=other), attention_mask=padded()),
        "has 4 tokens",
        "the one it takes from 6",
        "source_positions=",
    ),
    (
        lambda: call_with(patch.path("0.1", "output", source=other), **key_value_cache()),
        "paths are not supported",
        "key-value cache",
    ),
    # Running.
    (lambda: cache(model, tokens, 3), "cache: give sites", "got 3"),
    (lambda: cache(model, tokens, None), "cache: give sites", "got None"),
    (lambda: run(model, tokens, edit(RESULT, double)), RESULT, "never fired in 1 run(s)", "switched off"),
    (lambda: cache(model, tokens, RESULT), f"cache: {RESULT} never fired"),
    (
        lambda: run(model, tokens, patch.activations(RESULT, source=other)),
        f"{RESULT} never fired in a clean pass",
    ),
    (block_of_no_run, "ablate.zero(z, heads 0.1)", "not run inside the block"),
    (
        lambda: run(model, tokens, [ablate.zero("0.1"), ablate.zero("0.2")]),
        "not an intervention",
        "[Edit(",
    ),
    (lambda: edit("z", 2), "edit: fn", "function", "got 2"),
    (lambda: edit("z", lambda z, hook: 2 * z), "edit: fn", "the activation alone", "<lambda>"),
    (
        lambda: run(model, tokens, edit("z.0", lambda z: z.sum(-1))),
        "return a tensor [8, 6, 4, 4]",
        "got [8, 6, 4]",
    ),
    (hook_around_a_forward, "a hook runs the model's forward"),
    (another_thread, "in use by thread", "leave the block there first"),
    (thread_that_has_ended, "in use by thread", "(ended)"),
    # Ablations.
    (
        lambda: run(model, tokens, ablate.uniform("all", keys=[2, 3])),
        "query 0",
        "none of the keys [2, 3]",
        "positions=",
    ),
    (
        lambda: ablate.mean("pattern", reference=tokens, over="batch,pos"),
        'over="batch,pos"',
        "pattern",
        "queries",
    ),
    (lambda: ablate.neurons(0, 3, how="mean"), "ablate.neurons", "how='mean'", "reference="),
    (lambda: ablate.neurons(0, 3, reference=tokens), "reference=", "how='zero'"),
    (lambda: ablate.neurons([0, 1], 3), "layer=[0, 1]", "one layer"),
    (lambda: ablate.neurons(0, None), "ablate.neurons", "no neurons given"),
    (lambda: ablate.neurons(0, torch.zeros(24, dtype=torch.bool)), "[d_mlp]", "selects some", "[24]"),
    (
        lambda: run(model, tokens, ablate.neurons(0, torch.ones(12, dtype=torch.bool))),
        "[12]",
        "24 neurons",
    ),
    (lambda: run(model, tokens, ablate.neurons(0, 24)), "no neuron 24", "0-23"),
    (lambda: frequencies(period=5.0), "period=5.0", "whole number"),
    (lambda: frequencies([3]), "keys", "1 to 2", "[3]"),
    (lambda: frequencies(coords=None), "coords", "None"),
    (lambda: frequencies(grid=square[1:]), "grid", "5^2 = 25"),
    (lambda: frequencies(coords=[0, 3]), "grid: no position 3", "0-2"),
    (lambda: frequencies(keep="no"), "keep='no'", "True or False"),
    (lambda: run(model, (square + 1).clamp(max=10), without_1), "coordinates", "0-4"),
    (lambda: run(model, square[:, :2], without_1), "grid", "[example, 3, 24]", "[25, 2, 24]"),
    (lambda: run(model, square.clamp(max=9), without_1), "example 0", "not on the grid"),
    (lambda: call_on_embeddings(without_1), "token ids [batch pos]", "[25, 3, 16]"),
    (lambda: part_of_the_model(without_1), "whole model", "coordinates"),
    # Patching.
    (lambda: patch.path("pattern", "1.0", source=other), "pattern does not write"),
    (lambda: patch.path("0.1", "z", source=other), "z does not read"),
    (lambda: patch.path(0, "1.0", source=other), "sender 0 is a layer"),
    (lambda: patch.path("0.1", ["1.x"], source=other), "'1.x' as a head"),
    (lambda: patch.path("0.1", ["x.1"], source=other), "no site 'x'"),
    (lambda: run(model, tokens, patch.path("0.1", "1.9", source=other)), "no head 1.9"),
    (lambda: run(model, tokens, patch.path("1.0", "0.1", source=other)), "no path to q.0"),
    (lambda: second_block(patch.path("0.1", "1.0", source=other)), "did not pass blocks.0.attn.hook_z"),
    (
        lambda: run(model, tokens, patch.path("0.1", "1.0", other), patch.path("0.1", ("k", "1.0"), other)),
        "z.0, heads 1",
        "k.1, head 0",
        "cut twice",
    ),
    (
        lambda: run(model, tokens, patch.path("0.1", "1.0", other), patch.path("0.1", "1.1", other, "mlps")),
        "one through=",
        "None and 'mlps'",
    ),
    (hook_before_a_receiver, "blocks.1.attn.hook_q differs from what ln1 and the weights make"),
    (lambda: attribute(other[:, :5]), "source is [8, 5]", "base [8, 6]"),
    (lambda: attribute(metric=pick, batch=other[:4, :2]), "8 examples", "batch has 4"),
    (lambda: attribute(metric=pick, batch=5), "batch", "len()", "got int"),
    (lambda: attribute(site="resid_pre", by="head"), "resid_pre has no heads", "position, neuron or layer"),
    (lambda: attribute(by="neuron"), "site z has no neurons", "mlp_pre and mlp_post"),
    (lambda: attribute(metric=accuracy), "accuracy has no gradient"),
    (lambda: attribute(metric=in_numpy), "in_numpy: numpy has no gradient; compute it with torch"),
    (lambda: patch.edges(model, tokens, other, metric=in_numpy), "in_numpy: numpy has no gradient"),
    (lambda: attribute(metric=overwritten), "overwritten has no gradient"),
    (lambda: patch.attribution(build(d_vocab_out=1), tokens, other), "one column", "metric="),
    (silent_output, "output is tuple"),
    (lambda: attribute(metric=not_finite), "blocks.0.attn.hook_z is not finite"),
    *(
        (partial(gradients_of_one_made_for_inference, call), "torch.inference_mode", "copy the model outside")
        for call in (patch.attribution, patch.screen, patch.edges)
    ),
    (lambda: attribute(draws=0), "draws and flips", "0 and 9999"),
    (lambda: attribute(site=RESULT), f"{RESULT} never fired", "switched off"),
    # Transplants and permutations.
    (lambda: transplant.weights("donor.pt", "qkv"), "a model or a state_dict", "got str"),
    (lambda: transplant.weights(donor, "attention"), "'attention'", "q, k, v, qkv, o, attn"),
    (lambda: transplant.weights(build(normalization_type=None), "ln1"), "no weights of 'ln1'"),
    (made_for_inference, "torch.inference_mode"),
    (
        lambda: run(model, tokens, transplant.weights(build(n_layers=3), "mlp", layers=2)),
        "no layer 2",
        "0-1",
    ),
    (
        lambda: run(model, tokens, transplant.weights(build(n_layers=1), "q")),
        "source has no blocks.1.attn.W_Q",
    ),
    (
        lambda: run(model, tokens, transplant.weights(build(n_layers=3), "q")),
        "model has no parameter blocks.2.attn.W_Q",
    ),
    (lambda: run(model, tokens, transplant.weights(post_norm(), "qkv")), "source is a post-norm model"),
    (
        lambda: run(model, tokens, transplant.weights(build(d_mlp=32), "mlp")),
        "[16, 32] in the source",
        "[16, 24] in the model",
    ),
    (tied_embeddings, "one parameter", "neither"),
    (loaded_inside_a_block, "load_state_dict"),
    (lambda: permute.positions([1, 2, 3]), "[1, 2, 3]", "permutation of 0..n-1"),
    (
        lambda: run(model, tokens, permute.positions([1, 0, 2, 3, 4, 5, 6, 7])),
        "8 rows",
        "6 positions",
    ),
    (lambda: run(rotary(), tokens, permute.positions(0)), "no table of position embeddings"),
    (lambda: call_with(permute.positions(0), attention_mask=padded()), "padding", "position table"),
    # Sweeps.
    (lambda: sweep(model, tokens, [ablate.zero("0.1")]), "variants by name", "{'without 0.1'", "got list"),
    (lambda: sweep(model, tokens, ablate.zero("0.1")), "variants by name", "got Edit"),
    (lambda: sweep(model, tokens, {1: ablate.zero("0.1"), "1": ablate.zero("0.2")}), "two", "'1'"),
    (lambda: sweep(model, tokens, zero, metric=pick, batch=5), "batch", "len()", "got int"),
    (lambda: sweep(model, tokens, {"none": ()}), "variant 'none'", "no intervention"),
    (
        lambda: sweep(model, tokens, {**zero, "9.9": ablate.zero("9.9")}),
        "variant '9.9'",
        "ablate.zero",
        "no head 9.9",
    ),
    (
        lambda: sweep(model, tokens, zero, metric=pick, batch=other[:4, :2]),
        "tokens have 8",
        "batch has 4",
    ),
    (lambda: sweep(model, tokens, zero, batch_size=0), "batch_size=0"),
    (lambda: sweep(model, tokens, zero, draws=0), "draws and flips", "0 and 9999"),
    (lambda: sweep(model, tokens, zero, positions=hidden), "same positions", "mask"),
    (lambda: sweep(model, tokens, zero, engine="fast"), "engine='fast' is gone", '"auto"'),
    (lambda: sweep(model, tokens, zero, metric="accuracy"), "metric", "function", "'accuracy'"),
    (lambda: sweep(model, tokens, zero, metric=logit, batch=other), "logit", "(output, batch)"),
    *(
        (
            lambda metric=metric: sweep(model, tokens, zero, metric=metric, batch_size=1),
            error,
            "of 8 examples",
            "batch=",
        )
        for metric, error in (
            (lambda x: x[torch.arange(8), -1, tokens[:, 0]], "IndexError"),
            (lambda x: x[:, -1].gather(1, tokens[:, :1])[:, 0], "RuntimeError"),
            (
                lambda x: -torch.nn.functional.cross_entropy(x[:, -1], tokens[:, 0], reduction="none"),
                "ValueError",
            ),
        )
    ),
    (lambda: sweep(model, tokens, zero, metric=mean), "metric mean", "returned []", "8 examples"),
    (lambda: sweep(model, tokens, zero, metric=lambda output: {}), "empty dict"),
    (
        lambda: sweep(model, tokens, zero, metric=lambda x: {1: logit(x), "1": logit(x)}),
        "two values",
        "alike",
    ),
    (lambda: sweep(model, tokens, zero, metric=lambda x: 1j * logit(x)), "complex64", "real numbers"),
    (lambda: sweep(model, tokens, zero, metric=logit, positions=[0]), "not finite", "8 of 8 examples"),
    (lambda: sweep(model, tokens, zero, metric=lambda x: (logit(x), -torch.ones(8))), "negative"),
    (
        lambda: sweep(model, tokens, zero, metric=changing({"first": logit}, {"later": logit})),
        "metric later",
        "variant '0.1'",
        "unedited",
    ),
    (
        lambda: sweep(model, tokens, zero, metric=changing({"kept": logit, "lost": logit}, {"kept": logit})),
        "metric lost",
        "unedited",
        "not for variant '0.1'",
    ),
    (lambda: compare([]), "compare: no outputs"),
    (lambda: compare([(clean, {"a": clean}), (clean, {"b": clean})]), "compare", "has b", "had a"),
    (lambda: compare([(clean, {"a": clean[:, 1:]})]), "a is [8, 5, 11]", "[8, 6, 11]"),
    (
        lambda: sweep(model, tokens, zero, metric=logit_difference, batch=tokens[:, :2]),
        "logit_difference(right, wrong) makes the metric",
    ),
    (
        lambda: sweep(model, tokens, zero, metric=logit_difference(1, 2), batch=tokens),
        "leave out batch=",
    ),
    (lambda: logit_difference(11, 0)(clean), "ids of 0-10", "got 11"),
    (lambda: logit_difference(1, 0, position=6)(clean), "no position 6", "has 6 tokens"),
    (lambda: logit_difference([1, 2], 0)(clean), "right is given for 2 examples, there are 8"),
    (lambda: logit_difference(clean, 0), "right is an id or text", "[8, 6, 11]"),
    (lambda: logit_difference(1, -1), "wrong is an id or text", "got -1"),
    (lambda: logit_difference(1, 0, position="last"), "position is a whole number", "'last'"),
    (lambda: logit_difference(" Mary", 0)(clean), "answers that are texts need the prompts and the model"),
    (lambda: run(model, ["Mary"]), "no tokenizer, which texts need"),
    (lambda: run(model, [[1, 2], []]), "prompt 1 is empty"),
    (lambda: run(model, [[1, 2], ["a"]]), "a prompt is a text or a list of token ids", "prompt 1"),
    (lambda: prompts(model, tokens, side="middle"), "side='middle'", "'left', 'right'"),
    (
        lambda: prompts(model, {"input_ids": tokens, "attention_mask": tokens[:, :3] * 0}),
        "a mask is 0 or 1 for each of the tokens [8, 6]",
    ),
    (
        lambda: prompts(model, {"input_ids": tokens[:1], "attention_mask": [[1, 0, 1, 1, 1, 1]]}),
        "prompt 0 has padding between its tokens",
    ),
    (lambda: prompts(model, {"input_ids": tokens[:1], "attention_mask": [[0] * 6]}), "prompt 0 has no token"),
    (
        lambda: sweep(model, tokens, {"log": edit("resid_post.1", lambda x: x.log())}),
        "variant 'log'",
        "not finite",
    ),
    (lambda: sweep(build(Loss), tokens, zero), "output is dict"),
    (lambda: sweep(model, tokens, zero, checkpoints="run/"), "checkpoints", "dict"),
    (
        lambda: sweep(model, tokens, zero, checkpoints=[donor]),
        "pairs (label, model)",
        "got HookedTransformer",
    ),
    (lambda: sweep(model, tokens, zero, checkpoints={}), "no checkpoints"),
    (lambda: checkpoint("run/4000"), "checkpoint 4000", "state_dict", "got str"),
    (lambda: checkpoint(lambda: donor.state_dict), "checkpoint 4000", "must return a model or a state_dict"),
    (lambda: checkpoint(build(d_vocab=12).state_dict()), "embed.W_E [11, 16]", "[12, 16]"),
    (lambda: checkpoint(build(n_layers=3).state_dict()), "state_dict has blocks.2.ln1.w", "has not"),
    (
        lambda: checkpoint(rotary(rotary_base=100).state_dict(), rotary()),
        "blocks.0.attn.rotary_sin differs",
    ),
    (
        lambda: sweep(model, tokens, zero, checkpoints=[("last", donor), ("last", model)]),
        "two checkpoints",
        "'last'",
    ),
    (sweep_inside_a_transplant, "block around this sweep has replaced weights"),
    (lambda: grid(ablate.uniform, "heads"), "grid: axes", "dict"),
    (lambda: grid(ablate.uniform, {"heads": "0.1, 0.2"}), "axis 'heads'", "list", "'0.1, 0.2'"),
    (lambda: grid(ablate.uniform, {0: ["0.1"]}), "axis 0", "name of an argument"),
    (lambda: grid(ablate.uniform, {"head": ["0.1"]}), "grid: uniform", "missing"),
    (lambda: grid(ablate.uniform, {"keys": [0, 1]}, heads="0.1", keys=2), "axis", "argument, too"),
    (lambda: grid(ablate.uniform, {"heads": []}), "axis 'heads'", "no items"),
    (lambda: grid(ablate.uniform, {"heads": ["0.1", "0.1"]}), "grid: two", "'0.1'"),
    (lambda: ablate.each(ablate.uniform, "all"), "ablate.each", "list", "'all'"),
    (lambda: ablate.each(ablate.uniform, []), "ablate.each: nothing"),
    (lambda: ablate.each(ablate.uniform, ["0.1", "0.1"]), "ablate.each: two", "'0.1'"),
    (lambda: permute.draws(0), "count=0", "at least 1"),
    (lambda: draws(5, 3), "draws: make", "function", "got 5"),
    (lambda: draws(lambda seed: seed, 3), "make(seed)", "intervention", "got int"),
    (lambda: sweep(model, tokens, zero).plot("loss"), "plot: no metric 'loss'", "kl, mse, logit_diff"),
    (lambda: sweep(model, tokens, zero).plot(kind="bars"), "kind='bars'", "auto, points, heatmap"),
    (lambda: sweep(model, tokens, zero).plot(kind="heatmap"), "heatmap", "grid"),
    # Lens.
    (read_out_of_its_own, "lens", "not a linear function"),
    (norm_of_its_own, "lens", "blocks.0.ln1_post is neither LayerNorm nor RMS norm"),
    (hook_on_the_stream, "lens", "not the sum of its embeddings"),
    # Spectra.
    (lambda: fourier.basis(0), "period=0", "at least 1"),
    (lambda: fourier.spectrum([1.0, 2.0, float("nan")]), "finite", "[3]", "1 infinite or NaN"),
    (lambda: fourier.spectrum(torch.fft.fft(torch.ones(5))), "real numbers", "complex"),
    (lambda: fourier.spectrum(["a", "b"]), "numbers along an axis", "list"),
    (lambda: fourier.spectrum(model.W_E, axis=2), "no axis 2", "[11, 16]"),
    (lambda: fourier.Grid({"row": 0}), "Grid: axes", "names and sizes"),
    (lambda: fourier.Grid({1: 5, "1": 5}), "two coordinates are called '1'"),
    (lambda: fourier.Grid.of_inputs(square, {1: 0, "1": 1}, values=5), "two coordinates are called '1'"),
    (
        lambda: fourier.Grid.of_inputs(square, {"a": 0, "b": 3}, values=5),
        "coords",
        "positions 0-2",
    ),
    (
        lambda: fourier.Grid.of_inputs(square[:20], {"a": 0, "b": 1}, values=5),
        "25 combinations of a, b",
        "20 of 20",
    ),
    (lambda: fourier.spectrum(post[:20, -1], over_inputs), "axis 0 of [20, 24]", "5 × 5"),
    (
        lambda: fourier.components(fourier.Grid({"row": 4, "column": 6}), [1]),
        "equal sides",
        "[4, 6]",
    ),
    (lambda: fourier.components(over_inputs, [1], along=(2, 2)), "along", "2 coordinates", "1 or -1"),
    (lambda: fourier.OfLargest(-1), "OfLargest(-1)", "from 0"),
    (lambda: fourier.clusters(fourier.spectrum(post, over_inputs)), "one axis of neurons", "[3, 24]"),
    (lambda: fourier.clusters(spectrum, threshold=85), "threshold=85", "0 to 1"),
    (lambda: fourier.clusters(spectrum).neurons(3), "no frequency 3", "(1, 2)"),
    (lambda: fourier.spectrum(torch.ones(8), (2, 2, 2)).plot(), "1 or 2 coordinates", "has 3"),
    (lambda: fourier.active(torch.randn(9, 4), (3, 3), draws=0), "fourier.active: draws=0"),
    (lambda: fourier.active(torch.randn(8, 4), (2, 4)), "at least 3 values", "[2, 4]"),
    (lambda: fourier.ModularSum(digits, (1,), 5), "ModularSum", "coefficient for each"),
    (lambda: fourier.ModularSum(digits.float(), (1, 1), 5), "ModularSum", "whole numbers", "float32"),
    (lambda: answer.waves(3), "keys", "1 to 2", "[3]"),
    (lambda: answer.cosines(torch.zeros(25, 6)), "25 inputs", "classes 0-4", "[25, 6]"),
    # Attention patterns.
    (lambda: patterns.scores(model, tokens, {}), "no templates", "dict"),
    (
        lambda: patterns.scores(model, tokens, {1: patterns.identity(6), "1": patterns.previous(6)}),
        "two templates are called '1'",
    ),
    (
        lambda: patterns.scores(model, tokens, {"own": "identity"}),
        "template 'own'",
        "bool [query key]",
    ),
    (lambda: patterns.scores(model, tokens, {"own": torch.eye(6)}), "bool [6, 6]", "float32 [6, 6]"),
    (
        lambda: patterns.scores(model, tokens, {"own": lambda rows: templates["own"].expand(2, 6, 6)}),
        "bool [6, 6] or [8, 6, 6]",
        "[2, 6, 6]",
    ),
    (lambda: patterns.row(0, 3), "rows", "at least 1", "got 0"),
    (lambda: patterns.constant(6, None), "patterns.constant", "no position"),
    (lambda: patterns.marked(tokens), "patterns.marked", "boolean", "int64 [8, 6]"),
    (lambda: patterns.scores(model, tokens, templates, layers=2), "no layer 2", "0-1"),
    (lambda: patterns.scores(model, tokens, templates, batch_size=0), "batch_size=0", "at least 1"),
    (lambda: patterns.scores(model, tokens, templates, draws=0), "draws=0", "at least 1"),
    (
        lambda: patterns.scores(model, tokens, templates, batch=other[:4]),
        "tokens have 8",
        "batch has 4",
    ),
    (
        lambda: patterns.scores(model, tokens, templates, positions=tokens[:4] > 5),
        "mask of positions",
        "[8, 6]",
        "got [4, 6]",
    ),
    (skipped_attention, "blocks.1.attn.hook_pattern never fired"),
    (
        lambda: patterns.attention(model, tokens, layers=0).of((1, 0)),
        "no map of head 1.0",
        "layers 0",
        "heads 0-3",
    ),
    (
        lambda: patterns.attention(model, tokens, layers=0).plot(labels=list("abcde")),
        "5 labels",
        "6 positions",
    ),
    (lambda: scores.per_example("row"), "no template 'row'", "own"),
    (lambda: patterns.classify(scores, threshold=0), "threshold", "got 0"),
    (
        lambda: patterns.classify(patterns.scores(model, tokens, {"other": templates["own"]})),
        "'other'",
        "no name for a template",
    ),
    (lambda: patterns.classify(scores, unless={"own": "elsewhere"}), "no template 'elsewhere'", "own"),
    (lambda: patterns.movement(model, tokens, other[:4]), "[8, 6]", "[4, 6]"),
    (lambda: patterns.follow(model, tokens, other[:4], column, here, there), "patterns.follow", "one shape"),
    (
        lambda: patterns.follow(model, tokens, other, column[:2], here, there),
        "groups",
        "6 whole numbers",
        "[2]",
    ),
    (lambda: patterns.follow(model, tokens, other, column, here, here), "8 pairs", "before equals after"),
    # Probes.
    (lambda: linear({}), "no targets"),
    (lambda: linear({"token": tokens}, kind={"id": "classification"}), "no target 'id'", "token"),
    (lambda: linear(["one", "two"]), "target 'target'", "tensor of numbers", "got list"),
    (lambda: linear(torch.ones(8, 3)), "[batch 1 d]", "got [8, 3]", "tokens [8, 6]"),
    (lambda: linear(0.0 * tokens, kind="classification"), "classes", "whole numbers", "float32"),
    (lambda: linear(tokens / 0), "48 of 48", "not finite"),
    (lambda: linear(test=8), "test=8", "below 8"),
    (lambda: linear(test=[2, 9]), "example 9", "0-7"),
    (lambda: linear(test=1), "7 examples to fit", "1 held out"),
    (lambda: linear(positions=first_half, test=slice(4, 8)), "positions=", "held-out"),
    (lambda: linear(splits=first_half), "splits", "dict", "got Tensor"),
    (lambda: linear({1: tokens / 1, "1": tokens / 2}), "two targets are called '1'"),
    (lambda: linear(splits={1: first_half, "1": ~first_half}), "two splits are called '1'"),
    (lambda: linear(splits={"early": first_half[:, :3]}), "split 'early'", "[8, 6]", "[8, 3]"),
    (lambda: linear(sites=2), "probe: sites", "got 2"),
    (lambda: linear(sites=[]), "no site given"),
    (lambda: linear(sites=RESULT), f"{RESULT} never fired", "switched off"),
    (
        lambda: probe.linear(build(use_hook_tokens=True), tokens, tokens / 1, sites="hook_tokens"),
        "hook_tokens is [8, 6]",
        "[batch pos ...]",
    ),
    (lambda: linear(sites="scores"), "hook_attn_scores", "not finite", "masked"),
    (lambda: linear(untrained=build(n_layers=1)), "untrained model", "sites"),
    (lambda: linear(ridge=-1.0), "ridge=-1.0"),
    (lambda: linear(ridge=(0.1, 1.0), folds=1), "folds=1", "at least 2"),
    (lambda: linear(shuffles=-1), "shuffles=-1", "at least 0"),
    (
        lambda: probe.linear(model, tokens, tokens / 1, shuffles=0).plot("loss"),
        "no metric 'loss'",
        "mse, r2",
    ),
    # Screening.
    (
        lambda: patch.edges(model, tokens, other[:, :5], metric=logit),
        "patch.edges",
        "[8, 5]",
        "base [8, 6]",
    ),
    (
        lambda: patch.screen(model, tokens, other, pick, batch=other[:4, :2]),
        "patch.screen",
        "8 examples",
        "batch has 4",
    ),
    (lambda: patch.screen(model, tokens, other, metric=logit, exact=0), "exact=0", '"all"'),
    (lambda: patch.screen(model, tokens, other, metric=logit, draws=0), "draws and flips", "0 and 9999"),
    (lambda: patch.edges(model, tokens, other, metric=logit, steps=0), "steps=0", "at least 1"),
    (lambda: patch.edges(model, tokens, other, metric=accuracy), "accuracy has no gradient"),
    (lambda: patch.edges(model, tokens, other, metric=not_finite), "0.0.q is not finite"),
    (lambda: patch.screen(model, tokens, other, metric=masked), "read_positions", "mask [batch pos]"),
    (lambda: patch.screen(model, tokens, other, metric=logit, sites=[]), "no site given"),
    (
        lambda: patch.screen(model, tokens, other, metric=logit, sites="z", by="neuron"),
        "site z has no neurons",
        "mlp_pre and mlp_post",
    ),
    (lambda: patch.screen(model, tokens, other, metric=logit, sites=RESULT), f"{RESULT} never fired"),
    (screen_inside_a_block, "patch.edges", "block around this call"),
    (
        lambda: patch.screen(model, tokens, other, metric=logit, sites="z", exact=1).plot("loss"),
        "no metric 'loss'",
        "logit",
    ),
    # Grids of positions.
    (lambda: permute.slices(16, 0), "permute.slices: shape", "got 16"),
    (lambda: permute.within((4, 4), 2), "axis=2", "axes 0-1"),
    (lambda: permute.within((4, 4), 0, at=4), "no slice 4", "0-3"),
    # Classes of examples.
    (
        lambda: ablate.classes("mlp_post.0", remainder[1:], square),
        "ablate.classes",
        "25 examples",
        "[24]",
    ),
    (lambda: ablate.classes("mlp_post.0", [0, 1], square[[0, 0]]), "different from each other"),
    (lambda: ablate.classes("mlp_post.0", remainder, square, keep="no"), "keep='no'"),
    (lambda: run(model, square[[3, 24]], of_twenty), "example 1", "none of those that have classes"),
    (lambda: run(model, square[:, :2], of_twenty), "[20, 3]", "[25, 2]"),
    (lambda: part_of_the_model(of_twenty), "whole model", "classes"),
    (lambda: variance.explained([0.0, float("nan")], [0, 1]), "variance", "finite"),
    (lambda: variance.total(torch.randn(25, 4), remainder[1:]), "variance.total", "[25]", "[24]"),
    (lambda: variance.partition(torch.randn(25, 4), {}), "variance.partition", "dict"),
    (
        lambda: variance.partition(torch.randn(25, 4), {1: remainder, "1": remainder.flip(0)}),
        "two classes are called '1'",
    ),
    (
        lambda: variance.partition(torch.randn(25, 4), {"a": remainder, "b": 2 - remainder}),
        "a, b",
        "4 functions",
        "not independent",
    ),
    # Figures.
    (lambda: plots.heads(table, column="effect"), "no column effect", "layer, head, value"),
    (lambda: plots.heads(sweep(model, tokens, {"a": ablate.zero("0.1")}), "loss"), "no metric 'loss'"),
    (lambda: plots.heads(table.assign(head=None)), "no row about one head"),
    (lambda: plots.heads(pd.concat([table, table])), "several rows"),
    (lambda: plots.heads(torch.ones(2)), "[layer head]", "got [2]"),
    (lambda: plots.heads([[1.0, 2.0], [3.0]]), "list", "rows of one length"),
    (lambda: plots.heads(torch.ones(2, 2, dtype=torch.complex64)), "complex", "real, imag or abs"),
    (lambda: plots.heads({}), "nothing to draw"),
    (lambda: plots.heads(table.assign(value="much")), "column value"),
    (lambda: plots.heads(table, []), "metric=", "none"),
    (lambda: plots.heads(torch.ones(2, 2), layers=[0]), "1 names of layers", "2 rows"),
    (lambda: plots.attention(torch.ones(6)), "[query key]", "[6] of float32"),
    (lambda: plots.spectrum(torch.randn(8, 2), keys=[5]), "5 is no frequency", "1 to 4"),
    (lambda: scores.plot("head"), "no column 'head'", "score, effect"),
    (lambda: plots.spectrum(torch.ones(1, 4)), "one value", "at least two rows"),
    (lambda: plots.curve({}), "nothing to draw"),
    (lambda: plots.curve({1: [1.0, 2.0], "1": [2.0, 1.0]}), "two curves have one name"),
    (
        lambda: plots.curve({"a": [-1.0, 0.0]}, log_y=True, y_title="loss"),
        "no value of loss is above 0",
    ),
    (lambda: plots.curve(pd.DataFrame({"value": [1.0]})), "no column step", "has value"),
    (
        lambda: plots.curve(pd.DataFrame({"step": [0, 0], "value": [1.0, 2.0]})),
        "several rows at one step",
        "by=",
    ),
    (lambda: plots.curve(3), "a table, or name -> numbers", "got int"),
    (lambda: plots.curve(pd.DataFrame({"step": [0], "value": ["much"]})), "column value"),
    (
        lambda: plots.curve(pd.DataFrame({"step": ["a", "b"], "value": [1.0, 2.0]}), log_x=True),
        "no logarithm",
    ),
    (lambda: plots.curve({"a": ([0, 1], [1.0])}), "one length", "[2], [1]"),
    (lambda: plots.save(scores.plot(), "scores.gif"), "'scores.gif'", ".html, .json, .png"),
    (folder_for_a_file, "figures.html is a folder"),
    (lambda: plots.save(3, "scores.html"), "plotly figure", "got int"),
    (lambda: plots.save(scores.plot(), "nowhere/scores.html"), "no folder nowhere"),
]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("call", "words"), [(call, words) for call, *words in REFUSALS], ids=[words[1] for words in REFUSALS]
)
def test_a_wrong_call_is_refused_in_one_line_that_names_what_is_wrong(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CircuitsError) as refusal:
        call()
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message
