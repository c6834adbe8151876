"""Sweeps whose units run on executors: the same table as in one process, resumed, and refused in one line."""

import json
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pandas as pd
import pytest
import torch

from circuits import (
    CircuitsError,
    ablate,
    circuit,
    draws,
    edit,
    heads,
    intervene,
    logit_difference,
    patch,
    prompts,
    splice,
    sweep,
)
from circuits.sweeps import executors

FEW = {"draws": 50, "flips": 50}


class Here:
    """Runs units when they are submitted, and counts them; the one of number `fails` raises, and those behind it do not
    come to run, but for the last.
    """

    def __init__(self, fails=None, last=None):
        self.units, self.fails, self.last = [], fails, last

    def submit(self, function, unit):
        future = Future()
        self.units.append(unit)
        if len(self.units) - 1 == self.fails:
            future.set_exception(KeyboardInterrupt())
        elif self.fails is not None and self.fails < len(self.units) - 1 != self.last:
            pass
        else:
            try:
                future.set_result(function(unit))
            except Exception as error:
                future.set_exception(error)
        return future


@pytest.fixture(params=["HookedTransformer", "rotary"])
def load(request, make_model):
    given = {"positional_embedding_type": "rotary", "rotary_dim": 4} if request.param == "rotary" else {}
    model = make_model(n_layers=3, **given)
    return lambda: model


def squares(output, rows):
    return output.double().square().mean((1, 2)) + rows.double().mean(1)


def variants_of(model, tokens, other):
    found = dict(ablate.each(ablate.zero, heads("all", model)))
    found["mean"] = ablate.mean("1.0", other)
    found["resampled"] = draws(lambda seed: ablate.resample("2.1", source=other, seed=seed), 3)
    found["path"] = patch.path("0.0", ("q", "2.1"), other)
    found["together"] = (ablate.zero("0.1"), patch.activations("mlp_out.1", other))
    return found


def same(one, other):
    pd.testing.assert_frame_equal(one.frame, other.frame, check_exact=True)
    pd.testing.assert_frame_equal(one.baseline, other.baseline, check_exact=True)
    assert one.interventions == other.interventions
    assert one.settings["naive"] == other.settings["naive"]


@pytest.mark.parametrize(
    "split", [None, {"examples": 2}, {"examples": 3, "variants": 4}, {"variants": 1}], ids=str
)
def test_the_table_is_that_of_one_process(load, tokens, other_tokens, split):
    variants = variants_of(load(), tokens, other_tokens)
    given = {"metric": squares, "batch": tokens, "chunk": 2 * tokens.shape[1], **FEW}
    alone = sweep(load(), tokens, variants, **given)
    executor = Here()
    split_up = sweep(load, tokens, variants, executor=executor, split=split, **given)
    same(split_up, alone)
    rows = {(unit.inputs.rows.start, unit.inputs.rows.stop) for unit in executor.units}
    # Whole chunks of two examples.
    step = {2: 2, 3: 4}.get((split or {}).get("examples"), 2)
    assert rows == {(start, min(start + step, len(tokens))) for start in range(0, len(tokens), step)}
    most = (split or {}).get("variants", len(variants))
    assert max(len(unit.variants) for unit in executor.units) <= most


def test_a_sweep_that_was_stopped_goes_on(make_model, tokens, other_tokens):
    model = make_model()
    variants = {
        "0.1": ablate.zero("0.1"),
        "1.2": ablate.uniform("1.2"),
        "mean": ablate.mean("1.0", other_tokens),
    }
    _MODELS[:] = [model]
    load = _the_model
    given = {
        "metric": squares,
        "batch": tokens,
        "split": {"variants": 1},
        "chunk": 2 * tokens.shape[1],
        **FEW,
    }
    whole = Here()
    expected = sweep(load, tokens, variants, executor=whole, **given)
    done, count = {}, len(whole.units)
    with pytest.raises(KeyboardInterrupt):
        sweep(load, tokens, variants, executor=Here(fails=4, last=count - 1), done=done, **given)
    # What has ended is kept, in whatever order it ends.
    assert len(done) == 5
    # As a file would keep it.
    done = json.loads(json.dumps(done))
    rest = Here()
    same(sweep(load, tokens, variants, executor=rest, done=done, **given), expected)
    assert len(rest.units) == len(whole.units) - 5
    assert len(done) == len(whole.units)
    none = Here()
    same(sweep(load, tokens, variants, executor=none, done=done, **given), expected)
    assert not none.units
    # What decides a result is in the key.
    other = Here()
    sweep(load, tokens + 0, variants, executor=other, done=done, **{**given, "batch": tokens + 1})
    assert len(other.units) == len(whole.units)
    other = Here()
    changed = {**variants, "mean": ablate.mean("1.1", other_tokens)}
    sweep(load, tokens, changed, executor=other, done=done, **given)
    assert {name for unit in other.units for name in unit.variants} >= {"mean"}
    assert len(other.units) < len(whole.units)


def test_interventions_that_have_been_used_are_known_again(make_model, tokens, other_tokens):
    """What they have computed of themselves, such as the hash of a source, is not what decides a result."""
    model = make_model(n_layers=3)
    _MODELS[:] = [model]
    some = circuit.edges("0.0 -> 1.1.q; 1.2 -> output")
    fresh, used = (
        {
            **variants_of(model, tokens, other_tokens.clone()),
            "kept": some.keep(other_tokens.clone()),
            "map": ablate.mean_pattern("1.1", reference=other_tokens.clone()),
        }
        for _ in range(2)
    )
    before = {name: executors._digest(one) for name, one in used.items()}
    sweep(model, tokens, used, metric=squares, batch=tokens, **FEW)
    assert all(one == one and hash(one) is not None for one in used.values())
    assert {name: executors._digest(one) for name, one in used.items()} == before
    done = {}
    sweep(_the_model, tokens, used, executor=Here(), done=done, metric=squares, batch=tokens, **FEW)
    nobody = Here()
    sweep(_the_model, tokens, fresh, executor=nobody, done=done, metric=squares, batch=tokens, **FEW)
    assert not nobody.units


def test_every_process_loads_the_model_once(make_model, tokens):
    model, calls = make_model(), []

    def load():
        calls.append(1)
        return model

    variants = {"0.1": ablate.zero("0.1"), "1.2": ablate.zero("1.2")}
    sweep(load, tokens, variants, executor=Here(), split={"variants": 1}, **FEW)
    assert len(calls) == 2  # to read the variants, and as a worker


def test_padded_prompts_and_answers(make_model, tokens):
    model = make_model()
    given = prompts(model, [tokens[0, :4].tolist(), tokens[1].tolist(), tokens[2, :5].tolist()])
    metric = logit_difference([1, 2, 3], [4, 5, 6], position=-1)
    variants = ablate.each(ablate.zero, heads("all", model))
    alone = sweep(model, given, variants, metric, chunk=1, **FEW)
    same(sweep(lambda: model, given, variants, metric, executor=Here(), chunk=1, **FEW), alone)


def test_processes_and_threads(make_model, tokens):
    model = make_model()
    _MODELS[:] = [model]
    variants = ablate.each(ablate.zero, heads("all", model))
    alone = sweep(model, tokens, variants, squares, tokens, chunk=2 * tokens.shape[1], **FEW)
    for pool in (ThreadPoolExecutor(3), ProcessPoolExecutor(1, get_context("fork"))):
        with pool:
            found = sweep(
                _the_model,
                tokens,
                variants,
                squares,
                tokens,
                executor=pool,
                split={"variants": 2},
                chunk=2 * tokens.shape[1],
                **FEW,
            )
        same(found, alone)


_MODELS = []


def _the_model():
    """What a process that was forked finds in its memory."""
    return _MODELS[0]


def test_an_engine_that_fails_on_one_chunk_is_none_of_any(make_model, tokens, monkeypatch):
    """In one process a chunk that the replay gets wrong makes all run otherwise: here too, for the unit's variants."""
    model = make_model()
    seen = executors.measure_unit

    def measure_unit(unit):
        if unit.engine == "fast" and unit.inputs.rows.start == 2 and "0.1" in unit.variants:
            return {"refusal": "the replay of a chunk differs"}
        return seen(unit)

    monkeypatch.setattr(executors, "measure_unit", measure_unit)
    variants = ablate.each(ablate.zero, heads("all", model))
    given = {"chunk": 2 * tokens.shape[1], **FEW}
    found = sweep(lambda: model, tokens, variants, executor=Here(), split={"variants": 2}, **given)
    engines = found.frame.drop_duplicates("variant").set_index("variant")["engine"]
    assert set(engines[["0.0", "0.1"]]) == {"naive"}
    assert set(engines.drop(["0.0", "0.1"])) == {"fast"}
    assert set(found.settings["naive"]) == {"0.0", "0.1"}
    naive = sweep(model, tokens, variants, engine="naive", **given)
    np.testing.assert_allclose(found.frame["effect"], naive.frame["effect"], rtol=1e-9, atol=1e-12)
    with pytest.raises(CircuitsError, match=r"engine='fast'.*differs"):
        sweep(lambda: model, tokens, variants, executor=Here(), engine="fast", **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executor": 3}, "it has submit"),
        ({"model": "model"}, "give a function"),
        ({"split": {"heads": 2}}, "split is the most of each"),
        ({"split": {"examples": 0}}, "split is the most of each"),
        ({"done": []}, "done is a dict"),
        ({"checkpoints": {}}, "one model at a time"),
        ({"executor": None, "model": "model", "done": {}}, "with executor="),
    ],
    ids=str,
)
def test_faults_are_one_line(make_model, tokens, changes, message):
    model = make_model()
    given = {
        "model": lambda: model,
        "executor": Here(),
        "tokens": tokens,
        "variants": {"a": ablate.zero("0.1")},
        **changes,
    }
    given["model"] = model if given["model"] == "model" else given["model"]
    with pytest.raises(CircuitsError, match=message) as error:
        sweep(**given)
    assert "\n" not in str(error.value)


def test_what_cannot_be_sent_is_one_line(make_model, tokens):
    model = make_model()
    with (
        ProcessPoolExecutor(1, get_context("fork")) as pool,
        pytest.raises(CircuitsError, match="not lambdas"),
    ):
        sweep(lambda: model, tokens, {"a": edit("z.0", lambda z: z * 2)}, executor=pool, **FEW)
    assert torch.is_grad_enabled()


def test_functions_of_one_name_are_not_taken_for_each_other(make_model, tokens):
    """A process that measures several sweeps has each one's model, and keeps no result that it could not tell apart."""

    def loader(seed):
        model = make_model(seed)
        return lambda: model

    loaders = [loader(0), loader(1)]
    for load in loaders:
        variants = {"0.1": ablate.zero("0.1"), "twice": edit("z.0", lambda z: 2 * z)}
        alone = sweep(load(), tokens, variants, **FEW)
        same(sweep(load, tokens, variants, executor=Here(), **FEW), alone)
    with pytest.raises(CircuitsError, match="with done= everything can be pickled"):
        sweep(loaders[0], tokens, {"0.1": ablate.zero("0.1")}, executor=Here(), done={}, **FEW)


def test_blocks_of_this_process_are_not_those_of_the_workers(make_model, tokens):
    """Workers load the model: what a block edits here would be left out there."""
    model, variants = make_model(), {"0.1": ablate.zero("0.1")}
    weight = torch.randn(model.cfg.d_model, 20, dtype=torch.float64)
    pair = (lambda x: (x @ weight).relu(), lambda f: f @ weight.T)
    for block in (intervene(model, ablate.zero("mlp_out.0")), splice(model, {"resid_post.0": pair})):
        with block:
            model(tokens)
            with pytest.raises(CircuitsError, match="a block around it edits the model of this process"):
                sweep(lambda: model, tokens, variants, executor=Here(), **FEW)
    assert len(sweep(lambda: model, tokens, variants, executor=Here(), **FEW).frame) == 3


@pytest.mark.parametrize("more", [{}, {"executor": True}], ids=str)
def test_a_metric_of_other_names_in_some_chunks_is_refused(make_model, tokens, more):
    """Wherever the chunks are measured; what only some of them have would be lost."""
    model = make_model()

    def metric(output, rows):
        values = {"a": squares(output, rows)}
        return values if torch.equal(rows, tokens[:2]) else values | {"b": squares(output, rows)}

    given = {"metric": metric, "batch": tokens, "chunk": 2 * tokens.shape[1], **FEW}
    given |= {"executor": Here()} if more else {}
    with pytest.raises(CircuitsError, match="metric b: returned for the unedited model"):
        sweep((lambda: model) if more else model, tokens, {"0.1": ablate.zero("0.1")}, **given)


def test_threads_of_one_process_load_a_model_one_after_the_other(make_model, tokens):
    """Units of one sweep share a model, and another sweep takes none away."""
    model, loading, calls = make_model(), threading.Lock(), []

    def load():
        assert loading.acquire(blocking=False), "two at a time"
        calls.append(None)
        time.sleep(0.02)
        loading.release()
        return model

    variants = ablate.each(ablate.zero, heads("0.0-2", model))
    first = sweep(load, tokens, variants, executor=Here(), chunk=tokens.shape[1], **FEW)
    calls.clear()
    with ThreadPoolExecutor(4) as pool:
        found = sweep(load, tokens, variants, executor=pool, chunk=tokens.shape[1], **FEW)
    assert len(calls) == 2  # to read the variants, and once for all four threads
    same(found, first)
