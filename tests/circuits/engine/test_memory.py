"""What a sweep says of its memory, against all tensors that live at one time, counted from outside."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from circuits import CircuitsError, ablate, edit, heads, patch, probe, sweep
from circuits.engine.memory import FLOOR, divided, more_on_device
from circuits.model.inputs import read_prompts
from circuits.model.surface import Surface
from circuits.patterns import _read
from circuits.sweeps.sweep import AUTO_CHUNK

FEW = {"draws": 5, "flips": 5}

SHAPES = {
    "replayed": {"n_layers": 6, "n_heads": 6, "d_model": 192, "d_head": 32, "d_mlp": 768},
    "resumed": {
        "n_layers": 6,
        "n_heads": 4,
        "d_model": 128,
        "d_head": 32,
        "d_mlp": 344,
        "n_key_value_heads": 2,
        "gated_mlp": True,
        "act_fn": "silu",
        "normalization_type": "RMS",
        "positional_embedding_type": "alibi",
        "original_architecture": "Olmo2ForCausalLM",
    },
    "large vocabulary": {
        "n_layers": 3,
        "n_heads": 4,
        "d_model": 64,
        "d_head": 16,
        "d_mlp": 256,
        "d_vocab": 5000,
    },
}


class Live(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at one time, with garbage collected at every peak."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        known = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in known | set(self.sizes):
                storage = one.untyped_storage()
                key = storage._cdata
                self.sizes[key] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, key, None)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return found


def peak(function):
    gc.collect()
    with Live() as live:
        found = function()
    return found, live.peak


def asked(name):
    return "resumed" if name == "resumed" else "auto"


def mean(output):
    return output.flatten(1).mean(1)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("options", [{}, {"chunk": 1024}], ids=["default", "chunk"])
def test_what_is_told_is_what_is_taken(make_model, hooked_only, name, options):
    model = make_model(0, hooked_only, **{"n_ctx": 16, "d_vocab": 200, **SHAPES[name]})
    tokens = torch.randint(0, 200, (8, 16), generator=torch.Generator().manual_seed(0))
    every = heads("all", model)
    given = {
        **ablate.each(ablate.zero, every),
        "patch": patch.activations("z.1", tokens.flip(0), heads="1.0"),
    }
    found, taken = peak(
        lambda: sweep(model, tokens, given, metric=mean, engine=asked(name), **options, **FEW)
    )
    assert set(found.frame["engine"]) == {"resumed" if name == "resumed" else "fast"}
    assert found.settings["bytes"] == pytest.approx(taken, rel=0.2)


@pytest.mark.parametrize("name", SHAPES)
def test_a_bound_is_kept_to(make_model, hooked_only, name):
    model = make_model(0, hooked_only, **{"n_ctx": 16, "d_vocab": 200, **SHAPES[name]})
    tokens = torch.randint(0, 200, (8, 16), generator=torch.Generator().manual_seed(0))
    given = ablate.each(ablate.zero, heads("all", model))
    with pytest.raises(
        CircuitsError, match=r"memory=50: one example at a time takes about \d+ bytes"
    ) as caught:
        sweep(model, tokens, given, metric=mean, memory=50, **FEW)
    least = int(str(caught.value).split("about ")[1].split()[0])
    engines = set()
    for memory in (least, 3 * least, 20 * least):
        found, taken = peak(
            lambda memory=memory: sweep(
                model, tokens, given, metric=mean, memory=memory, engine=asked(name), **FEW
            )
        )
        assert taken <= memory
        assert found.settings["bytes"] <= memory
        engines |= set(found.frame["engine"])
    # The replay copies some of the weights, for which there must be room.
    assert engines == {"resumed"} if name == "resumed" else "fast" in engines
    with pytest.raises(CircuitsError, match="memory=-1; give a number of bytes"):
        sweep(model, tokens, given, metric=mean, memory=-1, **FEW)


def test_the_last_look_for_writes_is_told_too(make_model, hooked_only):
    """Of few tokens and many weights it takes more than the forwards."""
    sizes = {"n_layers": 2, "n_heads": 4, "d_model": 64, "d_head": 16, "d_mlp": 256, "d_vocab": 40}
    model = make_model(0, hooked_only, **sizes, n_ctx=8)
    tokens = torch.randint(0, 40, (2, 4), generator=torch.Generator().manual_seed(0))
    found, taken = peak(
        lambda: sweep(model, tokens, {"0.1": ablate.zero("0.1")}, metric=mean, chunk=4, engine="naive", **FEW)
    )
    assert found.settings["bytes"] == pytest.approx(taken, rel=0.05)


def test_a_bound_holds_for_the_sources_of_patches(make_model, hooked_only):
    sizes = {
        "n_layers": 2,
        "n_heads": 4,
        "d_model": 32,
        "d_head": 8,
        "d_mlp": 128,
        "n_ctx": 16,
        "d_vocab": 200,
    }
    model = make_model(0, hooked_only, **sizes)
    tokens = torch.randint(0, 200, (48, 16), generator=torch.Generator().manual_seed(0))
    given = {head: patch.activations("z", tokens.flip(0), heads=head) for head in ("0.1", "1.2")}
    found, taken = peak(lambda: sweep(model, tokens, given, metric=mean, memory=2 * 10**6, **FEW))
    assert taken <= 2 * 10**6
    assert found.settings["bytes"] == pytest.approx(taken, rel=0.2)
    # Two layers' z, in float64, and one of them twice while its pieces are put together.
    kept = 3 * 48 * 16 * 32 * 8
    with pytest.raises(CircuitsError, match=f", {kept} of them the sources of patches, .* or fewer examples"):
        sweep(model, tokens, given, metric=mean, memory=kept, **FEW)


def small(make_model, family):
    return make_model(0, family, n_layers=3, n_ctx=16, d_vocab=40).to(torch.float32)


def to_float64(model):
    model.to(torch.float64)


def hook_one(model):
    model.blocks[0].hook_resid_mid.register_forward_hook(lambda *_: None)


def switch_on(model):
    model.set_use_attn_result(True)
    model.set_use_split_qkv_input(True)


def wide_mean(output):
    return output.repeat(1, 1, 200).flatten(1).mean(1)


wide_mean.__name__ = "mean"
FEW_EXAMPLES, MANY_EXAMPLES = (
    torch.randint(0, 40, (count, 8), generator=torch.Generator().manual_seed(1)) for count in (4, 1024)
)


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ({"memory": 2 * 10**6}, to_float64, {"memory": 2 * 10**6}),
        ({}, hook_one, {}),
        ({"engine": "naive"}, switch_on, {"engine": "naive"}),
        ({"reference": FEW_EXAMPLES}, None, {"reference": MANY_EXAMPLES}),
        ({"reference": MANY_EXAMPLES}, None, {"reference": FEW_EXAMPLES}),
        ({}, None, {"metric": wide_mean}),
        ({}, None, {"function": lambda x: x.repeat(1, 1, 1, 200)[..., : x.shape[-1]]}),
    ],
    ids=["type", "hook", "switch", "large reference", "small reference", "metric", "function"],
)
def test_what_was_measured_before_is_not_told_of_something_else(
    make_model, hooked_only, before, change, after
):
    tokens = torch.randint(0, 40, (16, 8), generator=torch.Generator().manual_seed(0))

    def told(model, reference=FEW_EXAMPLES, metric=mean, function=torch.clone, **options):
        given = {f"z.{layer}": edit(f"z.{layer}", function) for layer in (0, 1, 2)}
        given["mean"] = ablate.mean("1.1", reference)
        return sweep(model, tokens, given, metric=metric, **options, **FEW).settings["bytes"]

    used, fresh = (small(make_model, hooked_only) for _ in range(2))
    told(used, **before)
    if change is not None:
        change(used)
        change(fresh)
    assert told(used, **after) == pytest.approx(told(fresh, **after), rel=0.01)


@pytest.mark.parametrize(
    ("engine", "metric"),
    [("auto", mean), ("auto", None), ("resumed", mean)],
    ids=["stacked", "large outputs", "resumed"],
)
def test_a_bound_holds_for_checkpoints_and_large_outputs(make_model, hooked_only, engine, metric):
    sizes = {"n_layers": 2, "n_heads": 4, "d_model": 64, "d_head": 16, "d_mlp": 256, "n_ctx": 16}
    sizes |= {"d_vocab": 50 if metric else 1000}
    model, *others = (make_model(seed, hooked_only, **sizes) for seed in range(4))
    states = {seed: other.state_dict() for seed, other in enumerate(others)}
    tokens = torch.randint(0, 50, (6, 8), generator=torch.Generator().manual_seed(0))
    given = {head: ablate.zero(head) for head in ("0.1", "1.2")}

    def swept(memory):
        return sweep(
            model, tokens, given, metric=metric, memory=memory, checkpoints=states, engine=engine, **FEW
        )

    with pytest.raises(CircuitsError) as caught:
        swept(50)
    least = int(str(caught.value).split("about ")[1].split()[0])
    stacked = set()
    for memory in (least, 3 * least, 12 * least):
        found, taken = peak(lambda memory=memory: swept(memory))
        assert taken <= memory
        assert found.settings["bytes"] == pytest.approx(taken, rel=0.2)
        stacked.add(found.settings["stacked"])
    assert (max(stacked) > 1) == (engine == "auto")


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_layers": 3, "n_heads": 12, "d_model": 768, "d_head": 64, "d_mlp": 3072, "d_vocab": 200},
        {"n_layers": 2, "n_heads": 4, "d_model": 64, "d_head": 16, "d_mlp": 256, "d_vocab": 20_000},
    ],
    ids=["GPT-2 small but for its depth", "large vocabulary"],
)
def test_half_as_much_again_as_a_loop(make_model, hooked_only, sizes):
    loop, ours = taken_by_loop_and_sweep(make_model(0, hooked_only, **sizes, n_ctx=16, act_fn="gelu_new"), 4)
    assert ours <= 1.5 * loop


@pytest.mark.parametrize(("examples", "least"), [(4, 1.5), (128, 0)], ids=["few examples", "many"])
def test_small_models_may_take_a_few_megabytes(make_model, hooked_only, examples, least):
    sizes = {"n_layers": 2, "n_heads": 4, "d_model": 32, "d_head": 8, "d_mlp": 128, "d_vocab": 200}
    model = make_model(0, hooked_only, **sizes, n_ctx=16)
    loop, ours = taken_by_loop_and_sweep(model, examples)
    beside = ours - sum(weight.nbytes for weight in model.parameters())
    # Of few examples more than half as much again, as forwards of a few rows would be mostly calls.
    assert least * loop < ours
    assert beside <= FLOOR["cpu"] or ours <= 1.5 * loop


def taken_by_loop_and_sweep(model, examples):
    """Bytes of a loop of hooks over all heads, and of a sweep, in float32, the model included."""
    model = model.float()
    model.cfg.dtype = torch.float32
    tokens = torch.randint(0, 200, (examples, 16), generator=torch.Generator().manual_seed(0))
    given = ablate.each(ablate.zero, heads("all", model))

    def loop():
        for head in heads("all", model):

            def zero(z, hook, head=head):
                z[:, :, head.head] = 0
                return z

            with torch.no_grad():
                mean(model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{head.layer}.attn.hook_z", zero)]))

    weights = sum(weight.nbytes for weight in model.parameters())
    _, theirs = peak(loop)
    _, taken = peak(lambda: sweep(model, tokens, given, metric=mean, **FEW))
    return weights + theirs, weights + taken


def test_on_an_accelerator_all_examples_of_a_small_model_share_a_forward(
    make_model, hooked_only, monkeypatch
):
    """There calls are what costs: of as many as on a CPU each forward would be mostly calls."""
    sizes = {"n_layers": 4, "n_heads": 8, "d_model": 256, "d_head": 32, "d_mlp": 1024, "d_vocab": 200}
    surface = Surface.of(make_model(0, hooked_only, **sizes, n_ctx=49).float())
    prompts = read_prompts(surface, torch.zeros(512, 49, dtype=torch.long), "sweep")
    here = divided(surface, prompts, more_on_device(surface, AUTO_CHUNK), None, given=False)
    monkeypatch.setattr(Surface, "device", torch.device("meta"))
    there = divided(surface, prompts, more_on_device(surface, AUTO_CHUNK), None, given=False)
    assert here.tokens <= 8192
    assert there.step == 512
    assert there.tokens >= 512 * 49
    few = divided(surface, prompts[:64], more_on_device(surface, AUTO_CHUNK), None, given=False)
    assert few.tokens > 8 * 64 * 49


class Stopped(Exception):
    """The first forward was about to run."""


@pytest.mark.parametrize(("vocabulary", "times"), [(200, 16), (2**16, 1)])
def test_on_an_accelerator_patterns_and_probes_take_more_tokens_too(
    make_model, hooked_only, monkeypatch, vocabulary, times
):
    """Sixteen times as many, but for models whose outputs of so many tokens would take gigabytes."""
    sizes = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_head": 8, "d_mlp": 32, "d_vocab": vocabulary}
    model = make_model(0, hooked_only, **sizes, n_ctx=8).float()
    surface = Surface.of(model)
    prompts = read_prompts(surface, torch.zeros(2**16, 8, dtype=torch.long), "probe")
    forwards = []

    def stop(self, given):
        forwards.append(len(given))
        raise Stopped

    monkeypatch.setattr(Surface, "call", stop)

    def rows_of_both():
        [first, *_] = _read.chunks(surface, prompts, (0, 1), "auto", "patterns")
        with pytest.raises(Stopped):
            probe.linear(model, prompts, torch.zeros(2**16), sites="resid_post.0", shuffles=0)
        return first.stop - first.start, forwards.pop()

    entries = 2 * 2 * 8**2
    assert rows_of_both() == (min(2**14 // 8, 2**22 // entries), 2**12 // 8)
    monkeypatch.setattr(Surface, "device", torch.device("meta"))
    assert rows_of_both() == (min(times * 2**14 // 8, 2**26 // entries), times * 2**12 // 8)
