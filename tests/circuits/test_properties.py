"""Random interventions, nested, failing, among other people's hooks: what must hold for all of them.

The suite tries few; a longer search: pytest tests/circuits/test_properties.py --hypothesis-profile=campaign
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import pickle
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from circuits import (
    CircuitsError,
    Site,
    ablate,
    cache,
    edit,
    intervene,
    lens,
    patch,
    permute,
    run,
    sweep,
    transplant,
)
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS
from circuits.model.state import state_of

BATCH, LENGTH, PERIOD = 4, 5, 3
Recipe = tuple[Any, ...]

# hypothesis functions take no function-scoped fixtures; these stand in for them.
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}

# Read when this file is collected, with the profile that was asked for loaded.
few = settings(max_examples=max(1, settings().max_examples // 4))


@pytest.fixture(autouse=True, scope="module")
def _models(make_model):
    """Every shape in every installed class."""
    names = make_model.__globals__
    for family in names["FAMILIES"]:
        for shape, changes in names["SHAPES"].items():
            if family != names["HOOKED"] and "norm" in changes:
                continue  # only HookedTransformer has a post-norm form
            MODELS[f"{family} {shape}"] = make_model, {"family": family, **changes}
    yield
    MODELS.clear()
    model_of.cache_clear()


def build(name: str, seed: int = 0) -> Any:
    make, changes = MODELS[name]
    return make(seed=seed, **changes)


@functools.cache
def model_of(name: str, seed: int = 0) -> Any:
    """One for all examples that put nothing on it."""
    return build(name, seed)


def from_coordinates(pairs: Tensor) -> Tensor:
    """[n pos] from [n 2]: what else an example holds follows from its coordinates, as on a grid it must."""
    rest = pairs.sum(1, keepdim=True) + pairs[:, :1] * torch.arange(1, LENGTH - 1)
    return torch.cat([pairs, rest % PERIOD + PERIOD], 1)


def tokens_of(seed: int, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return from_coordinates(torch.randint(0, PERIOD, (batch, 2), generator=generator))


def scaled(x: Tensor) -> Tensor:
    return x * 1.25


def shifted_in_place(x: Tensor) -> Tensor:
    x += 0.5
    return x


GRID = from_coordinates(torch.cartesian_prod(torch.arange(PERIOD), torch.arange(PERIOD)))

# ---- Random interventions, as recipes: plain values, equal exactly when they mean the same


class Shape:
    """What can be drawn for a model."""

    def __init__(self, model: Any) -> None:
        surface = HookedModel.of(model)
        self.layers, self.heads = surface.n_layers, surface.n_heads
        self.neurons = 0 if KINDS["mlp_post"].hook.format(0) not in surface.hooks else surface.sizes["d_mlp"]
        self.sites = [
            (name, layer)
            for name, kind in KINDS.items()
            for layer in (range(self.layers) if kind.per_layer else [None])
            if kind.hook.format(layer) in surface.hooks
        ]

    def head_specs(self) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
        """Never all heads of the model, which "all" would be equal to in meaning and not in words."""
        every = [(layer, head) for layer in range(self.layers) for head in range(self.heads)]
        chosen = st.lists(st.sampled_from(every), min_size=1, max_size=3, unique=True)
        return chosen.map(lambda heads: tuple(sorted(heads)))

    def queries(self) -> st.SearchStrategy[Any]:
        positions = st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=3, unique=True)
        return st.one_of(
            st.none(),
            positions.map(lambda found: tuple(sorted(found))),
            st.integers(1, 6).map(lambda seed: ("mask", seed)),
        )

    def site_and_heads(self, without: tuple[str, ...] = ()) -> st.SearchStrategy[tuple[str, int | None, Any]]:
        def heads_of(site: tuple[str, int | None]) -> st.SearchStrategy[Any]:
            name, layer = site
            one = st.integers(0, self.heads - 1).map(lambda head: ((layer, head),))
            return st.tuples(
                st.just(name), st.just(layer), st.none() if KINDS[name].head_axis is None else st.none() | one
            )

        return st.sampled_from([site for site in self.sites if site[0] not in without]).flatmap(heads_of)

    def recipes(self) -> st.SearchStrategy[Recipe]:
        seeds, queries = st.integers(1, 3), self.queries()
        heads, layers = self.head_specs(), st.integers(0, self.layers - 1)
        components = [
            (part, layer) for part in ("q", "qkv", "o", "attn") for layer in (None, *range(self.layers))
        ]
        components += [(part, None) for part in ("embed", "pos_embed", "unembed")]
        what = heads | layers | st.sampled_from(self.sites).map(lambda site: str(Site(*site)))
        kinds = [
            st.tuples(
                st.just("uniform"), heads | st.just("all"), st.sampled_from([None, (0,), (0, 2)]), queries
            ),
            st.tuples(st.just("mean_pattern"), heads, seeds, queries),
            st.tuples(st.just("zero"), what, queries),
            st.tuples(st.just("mean"), what, seeds, st.just("batch"), queries),
            st.tuples(st.just("mean"), heads | layers, seeds, st.just("batch,pos"), queries),
            st.tuples(st.just("resample"), what, seeds, st.integers(0, 2), queries),
            st.tuples(st.just("patch"), self.site_and_heads(), seeds, st.booleans(), queries),
            st.tuples(st.just("edit"), self.site_and_heads(), st.booleans(), queries),
            st.tuples(st.just("permute"), st.integers(0, 3) | st.permutations(range(3)).map(tuple)),
            st.tuples(st.just("transplant"), st.integers(1, 2), st.sampled_from(components)),
            st.tuples(
                st.just("frequencies"),
                # Minus infinity has no waves.
                self.site_and_heads(without=("scores",)),
                st.booleans(),
                st.sampled_from(["all", "sum"]),
                queries,
            ),
            st.tuples(st.just("path"), heads, st.sampled_from([None, "mlps"]), seeds, queries),
        ]
        if self.neurons:
            some = st.lists(st.integers(0, self.neurons - 1), min_size=1, max_size=4, unique=True)
            how = st.sampled_from(["zero", "mean", "resample"])
            kinds.append(
                st.tuples(
                    st.just("neurons"), layers, some.map(lambda x: tuple(sorted(x))), how, seeds, queries
                )
            )
        return st.one_of(kinds)


def queries_of(given: Any) -> Any:
    if isinstance(given, tuple) and given[0] == "mask":
        mask = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(given[1])) < 0.5
        mask[0, given[1] % LENGTH] = True
        return mask
    return given


def what_of(given: Any) -> Any:
    return list(given) if isinstance(given, tuple) else given


def make(recipe: Recipe, name: str) -> Any:
    """The intervention that a recipe stands for, on models called `name`."""
    kind, *rest = recipe
    if kind == "uniform":
        heads, keys, queries = rest
        return ablate.uniform(what_of(heads), keys, positions=queries_of(queries))
    if kind == "mean_pattern":
        heads, seed, queries = rest
        return ablate.mean_pattern(
            what_of(heads), reference=tokens_of(seed, 3), positions=queries_of(queries)
        )
    if kind == "zero":
        what, queries = rest
        return ablate.zero(what_of(what), positions=queries_of(queries))
    if kind == "mean":
        what, seed, over, queries = rest
        return ablate.mean(what_of(what), tokens_of(seed, 3), over, positions=queries_of(queries))
    if kind == "resample":
        what, source, seed, queries = rest
        return ablate.resample(what_of(what), tokens_of(source), seed, positions=queries_of(queries))
    if kind == "patch":
        (site, layer, heads), seed, one, queries = rest
        source = tokens_of(seed, 1 if one else BATCH)
        return patch.activations(Site(site, layer), source, heads, positions=queries_of(queries))
    if kind == "edit":
        (site, layer, heads), in_place, queries = rest
        function = shifted_in_place if in_place else scaled
        return edit(Site(site, layer), function, heads, positions=queries_of(queries))
    if kind == "permute":
        return permute.positions(rest[0])
    if kind == "transplant":
        seed, (components, layers) = rest
        return transplant.weights(model_of(name, seed), components, layers)
    if kind == "neurons":
        layer, neurons, how, seed, queries = rest
        clean = {
            "zero": {},
            "mean": {"reference": tokens_of(seed, 3)},
            "resample": {"source": tokens_of(seed)},
        }
        return ablate.neurons(layer, neurons, how, **clean[how], positions=queries_of(queries))
    if kind == "frequencies":
        (site, layer, heads), keep, directions, queries = rest
        return ablate.frequencies(
            *(Site(site, layer), [1], [0, 1], PERIOD, keep),
            grid=GRID,
            directions=directions,
            heads=heads,
            positions=queries_of(queries),
        )
    assert kind == "path"
    heads, through, seed, queries = rest
    return patch.path(what_of(heads), "output", tokens_of(seed), through, positions=queries_of(queries))


@st.composite
def models_and_recipes(draw: Any, least: int = 1, most: int = 1) -> tuple[str, list[Recipe]]:
    name = draw(st.sampled_from(sorted(MODELS)))
    shape = Shape(model_of(name))
    recipes = draw(st.lists(shape.recipes(), min_size=least, max_size=most))
    assume(not clash(recipes))
    return name, recipes


def clash(recipes: list[Recipe]) -> bool:
    """Permuted positions are refused, in one line, where an edit has made the examples' positions differ."""
    edited = any(
        part == "pos_embed" or (isinstance(part, tuple) and "pos_embed" in part) for _, part, *_ in recipes
    )
    return edited and any(kind == "permute" for kind, *_ in recipes)


# ---- Nothing is left behind


class Interrupted(Exception):
    """Raised by a test, in some body or hook of its own."""


HOOK_BOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def footprint(model: nn.Module) -> dict[str, Any]:
    """Everything that an intervention could leave behind, on the model and around it."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}, training"] = module.training
        for book in HOOK_BOOKS:
            found[f"{name}, {book}"] = list(getattr(module, book).items())
        for book in ("fwd_hooks", "bwd_hooks"):
            handles = getattr(module, book, None)
            if isinstance(handles, list):
                found[f"{name}, {book}"] = [
                    (id(handle), handle.hook.id, handle.is_permanent, handle.context_level)
                    for handle in handles
                ]
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name}, the object"] = id(value)
        # A hash: pytest takes minutes to show how two long byte strings differ.
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{name}, its values"] = hashlib.sha256(bits).hexdigest()
        found[f"{name}, requires_grad"] = value.requires_grad
    state = state_of(model)
    numpy_state = np.random.get_state()
    found["our state"] = (state.suspended, state.rows, state.total, dict(state.originals))
    found["gradients"] = torch.is_grad_enabled()
    found["torch's generator"] = torch.get_rng_state().numpy().tobytes()
    found["numpy's generator"] = (numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:])
    # Not python's own: beartype, which checks shapes in these tests, draws from it.
    found["default dtype"] = torch.get_default_dtype()
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before | after if before.get(name) != after.get(name)]


class Users:
    """Somebody else's hooks of every kind, which count how often they fire."""

    def __init__(self, model: Any, kinds: list[str], chance: random.Random) -> None:
        self.model, self.fired, self.raising = model, Counter(), 0
        points = sorted(HookedModel.of(model).hooks)
        always = [name for name in points if name.endswith(("hook_z", "hook_resid_pre"))]
        for number, kind in enumerate(kinds):
            name = chance.choice(always)
            count = self._counter(f"{number} {kind}")
            point = HookedModel.of(model).hooks[name]
            if kind in ("add_hook", "permanent"):
                model.add_hook(
                    name, lambda value, hook, count=count: count(value), is_permanent=kind == "permanent"
                )
            elif kind == "raw":
                point.register_forward_hook(lambda module, inputs, output, count=count: count(output))
            elif kind == "raw pre":
                point.register_forward_pre_hook(lambda module, inputs, count=count: count(None))
            elif kind == "backward":
                model.add_hook(name, lambda value, hook: None, dir="bwd")
            else:
                model.register_forward_hook(lambda module, inputs, output, count=count: count(None))

    def _counter(self, name: str) -> Callable[[Any], Any]:
        def count(value: Any) -> Any:
            self.fired[name] += 1
            if self.raising == 1:
                raise Interrupted
            self.raising = max(0, self.raising - 1)
            return None if value is None else value * 1.01

        if "backward" not in name:
            self.fired[name] = 0
        return count

    def all_fire(self, tokens: Tensor) -> bool:
        self.fired.update({name: -count for name, count in self.fired.items()})
        with torch.no_grad():
            self.model(tokens)
        return all(count > 0 for count in self.fired.values())


KINDS_OF_HOOKS = ["add_hook", "permanent", "raw", "raw pre", "backward", "whole model"]


@given(data=st.data())
def test_nothing_is_left_behind(data):
    name, recipes = data.draw(models_and_recipes(1, 5))
    # Two paths may be the same edge, which is refused: at most one, and it stands in a block.
    path = next((recipe for recipe in recipes if recipe[0] == "path"), None)
    recipes = [recipe for recipe in recipes if recipe[0] != "path" or recipe is path]
    model, tokens = build(name), tokens_of(7)
    depth = data.draw(st.integers(1, min(3, len(recipes))), label="blocks")
    blocks = [recipes[index::depth] for index in range(depth)]
    # Of these every value is as likely as another; what hypothesis draws itself tends to the simplest.
    chance = data.draw(st.randoms(use_true_random=True), label="chance")
    failure = chance.choice([None] * 4 + [RuntimeError, KeyboardInterrupt, "hook", "function"])
    level = chance.randint(0, depth)
    actions = chance.choices(
        ["call", "gradient", "run", "sweep", "lens", "attribution"], k=chance.randint(1, 2)
    )
    users = Users(model, chance.choices(KINDS_OF_HOOKS, k=chance.randint(1, 3)), chance)
    for module in model.modules():
        module.training = chance.random() < 0.5
    with torch.no_grad():
        clean = model(tokens)
    # Made before the footprint is taken: the donor of a transplant draws from the global generators.
    others = [recipe for recipe in recipes if recipe is not path]
    own = make(others[0], name) if others else edit("z", torch.neg)
    made = [[make(recipe, name) for recipe in block] for block in blocks]
    error = failure() if isinstance(failure, type) else Interrupted()

    def fail(value: Tensor) -> Tensor:
        raise error

    def act(action: str) -> None:
        if action == "call":
            model(tokens)
        elif action == "gradient":
            model(tokens).sum().backward()
            model.zero_grad(set_to_none=True)
        elif action == "run":
            run(model, tokens, own, cache=["z"])
        elif action == "lens":
            # Refused where a hook of the user's adds to the residual stream.
            with suppress(CircuitsError):
                lens(model, tokens, own)
        elif action == "attribution":
            patch.attribution(model, tokens, tokens_of(2), draws=2, flips=2)
        else:
            sweep(model, tokens, {"own": own}, batch_size=2, draws=2, flips=2)

    def descend(at: int) -> None:
        if at == level and isinstance(failure, type):
            raise error
        if at == depth:
            # Edits that never fire are an error of their own, tested elsewhere.
            model(tokens)
            if failure == "function":
                run(model, tokens, own, edit("z", fail))
            if failure == "hook" and users.fired:
                users.raising = 1 + level
                error.args = ("from a hook of the user's",)
            for action in actions:
                act(action)
            return
        with intervene(model, *made[at]):
            descend(at + 1)

    before = footprint(model)
    caught: BaseException | None = None
    try:
        with torch.no_grad() if chance.random() < 0.3 and "gradient" not in actions else nullcontext():
            descend(0)
    except (Interrupted, RuntimeError, KeyboardInterrupt) as raised:
        caught = raised
    event(f"failure: {failure if not isinstance(failure, type) else failure.__name__}")
    if isinstance(failure, type) or failure == "function":
        assert caught is error
    elif failure is None:
        assert caught is None
    users.raising = 0
    assert differences(before, footprint(model)) == []
    assert users.all_fire(tokens)
    with torch.no_grad():
        assert bool((model(tokens) == clean).all())


# ---- What edits mean


@given(data=st.data())
@few
def test_an_edit_changes_its_own_heads_and_positions_only(data):
    name, (recipe,) = data.draw(models_and_recipes())
    assume(recipe[0] not in ("transplant", "path"))
    model, tokens = model_of(name), tokens_of(7)
    given = make(recipe, name)
    first = given.plan(HookedModel.of(model))[0]
    before = [
        Site(site, layer).hook()
        for site, layer in Shape(model).sites
        if layer is not None and layer < (first.layer or 0)
    ]
    clean = cache(model, tokens, [*before, first.hook])
    _, edited = run(model, tokens, given, cache=[*before, first.hook])
    assert all(bool((edited[hook] == clean[hook]).all()) for hook in before)
    selected = first.selected(clean[first.hook], None, None).expand_as(clean[first.hook])
    assert bool((edited[first.hook] == clean[first.hook])[~selected].all())
    event(recipe[0])


@given(data=st.data())
@few
def test_arguments_in_order_are_blocks_nested_in_order(data):
    name, recipes = data.draw(models_and_recipes(2, 4))
    model, tokens = model_of(name), tokens_of(7)
    interventions = [make(recipe, name) for recipe in recipes]
    together = run(model, tokens, *interventions)
    with ExitStack() as stack:
        for one in interventions[:-1]:
            stack.enter_context(intervene(model, one))
        nested = run(model, tokens, interventions[-1])
    assert bool((together == nested).all())


@given(data=st.data())
@few
def test_a_sweep_is_its_variants_run_one_by_one(data):
    name, recipes = data.draw(models_and_recipes(1, 3))
    model, tokens = model_of(name), tokens_of(7)
    size = data.draw(st.integers(1, 4 * BATCH), label="batch_size")
    variants = {str(number): make(recipe, name) for number, recipe in enumerate(recipes)}
    variants["together"] = tuple(variants.values())
    weight = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def metric(output: Tensor) -> Tensor:
        return (output @ weight).square().sum(1)

    frame = sweep(model, tokens, variants, metric=metric, batch_size=size, draws=2, flips=2).frame
    clean = metric(run(model, tokens))
    for row, variant in zip(frame.itertuples(), variants.values(), strict=True):
        alone = metric(run(model, tokens, *(variant if isinstance(variant, tuple) else (variant,))))
        np.testing.assert_allclose(row.value, alone.mean(), rtol=1e-9)
        np.testing.assert_allclose(row.baseline, clean.mean(), rtol=1e-9)


# ---- Interventions are values


@given(data=st.data())
@few
def test_equal_where_and_only_where_they_say_the_same(data):
    name, recipes = data.draw(models_and_recipes(1, 1))
    # Those of one kind are the hardest to tell apart.
    others = Shape(model_of(name)).recipes()
    recipes.append(data.draw(others.filter(lambda recipe: recipe[0] == recipes[0][0]) | others))
    first, second = (make(recipe, name) for recipe in recipes)
    again = make(recipes[0], name)
    assert first == again
    assert hash(first) == hash(again)
    texts = [json.dumps(one.describe(), sort_keys=True) for one in (first, again, second)]
    assert texts[0] == texts[1]
    assert (first == second) == (recipes[0] == recipes[1]) == (texts[0] == texts[2])
    assert repr(first) == repr(again)
    assert len(repr(first)) < 4000
    assert "\n" not in first.label


@given(data=st.data())
@few
def test_they_survive_copies_and_pickles(data):
    name, (recipe,) = data.draw(models_and_recipes())
    model, tokens = model_of(name), tokens_of(7)
    first = make(recipe, name)
    for other in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert other == first
        assert hash(other) == hash(first)
    assert bool((run(model, tokens, other) == run(model, tokens, first)).all())


@given(data=st.data())
@few
def test_planning_changes_nothing_and_holds_no_model(data):
    """One value serves any model of its architecture, before and after others."""
    name, (recipe,) = data.draw(models_and_recipes())
    given, tokens = make(recipe, name), tokens_of(7)
    one, two = model_of(name, 0), model_of(name, 5)
    before = footprint(one)
    given.plan(HookedModel.of(one))
    assert differences(before, footprint(one)) == []
    first = run(one, tokens, given)
    run(two, tokens, given)
    assert bool((run(one, tokens, given) == first).all())
