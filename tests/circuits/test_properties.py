"""Random interventions, nested, failing, among other people's hooks: nothing is left behind. And they are values.

A longer search: pytest tests/circuits/test_properties.py --hypothesis-profile=campaign
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from circuits import ablate, circuit, edit, intervene, patch, permute, run, sweep, transplant
from circuits.model.edit_state import get_edit_state
from circuits.model.hooked_model import HookedModel
from tests.circuits.conftest import KINDS_OF_MODELS, SHAPES, build

BATCH, LENGTH, PERIOD = 4, 5, 3
MODELS = {
    f"{family} {shape}": {"family": family, **SHAPES[shape]}
    for shape, family in KINDS_OF_MODELS
    if shape in SHAPES
}


def from_coordinates(pairs: Tensor) -> Tensor:
    """[n pos] from [n 2]: what else an example holds follows from its coordinates, as on a grid it must."""
    rest = pairs.sum(1, keepdim=True) + pairs[:, :1] * torch.arange(1, LENGTH - 1)
    return torch.cat([pairs, rest % PERIOD + PERIOD], 1)


def tokens_of(seed: int, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return from_coordinates(torch.randint(0, PERIOD, (batch, 2), generator=generator))


GRID = from_coordinates(torch.cartesian_prod(torch.arange(PERIOD), torch.arange(PERIOD)))
MASK = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5


def shifted_in_place(x: Tensor) -> Tensor:
    x += 0.5
    return x


# Of every kind; those of layer 0, as some models have no other. Each is made of the settings of its model.
INTERVENTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "uniform": lambda model: ablate.uniform("0.1", [0], positions=[0, 2]),
    "mean pattern": lambda model: ablate.mean_pattern("0.0", tokens_of(1, 3), positions=MASK),
    "edited mean pattern": lambda model: ablate.mean_pattern("all", tokens_of(1), of="edited"),
    "zero": lambda model: ablate.zero("z.0"),
    "mean": lambda model: ablate.mean("0.1, 0.2", tokens_of(2, 3), "batch,pos"),
    "resample": lambda model: ablate.resample("resid_post.0", tokens_of(3), 1),
    "patch": lambda model: patch.activations("scores.0", tokens_of(1, 1), "0.3", positions=MASK),
    "edit": lambda model: edit("q", shifted_in_place, positions=-1),
    "edit of the tokens": lambda model: edit("embed", shifted_in_place),
    "permute": lambda model: permute.positions(2),
    "transplant": lambda model: transplant.weights(build(1, **model), "qkv"),
    "transplanted embeddings": lambda model: transplant.weights(build(2, **model), "embed"),
    "frequencies": lambda model: ablate.frequencies("z.0", [1], [0, 1], PERIOD, grid=GRID),
    "circuit": lambda model: circuit.edges(["0.1 -> output"]).keep(tokens_of(2)),
    "path": lambda model: patch.path("0.1", "output", tokens_of(2), positions=MASK),
}


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
        found[f"{name}, its gradient"] = (
            None if value.grad is None else (id(value.grad), float(value.grad.sum()))
        )
    state = get_edit_state(model)
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
        points = sorted(HookedModel(model).hooks)
        always = [name for name in points if name.endswith(("hook_z", "hook_resid_pre"))]
        for number, kind in enumerate(kinds):
            name = chance.choice(always)
            count = self._counter(f"{number} {kind}")
            point = HookedModel(model).hooks[name]
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
    settings = MODELS[data.draw(st.sampled_from(list(MODELS)))]
    unique = {"unique_by": lambda name: name.replace("circuit", "path")}  # a circuit is paths, one block's
    names = data.draw(st.lists(st.sampled_from(list(INTERVENTIONS)), min_size=1, max_size=5, **unique))
    model, tokens = build(**settings), tokens_of(7)
    depth = data.draw(st.integers(1, min(3, len(names))), label="blocks")
    blocks = [names[index::depth] for index in range(depth)]
    # Of these every value is as likely as another; what hypothesis draws itself tends to the simplest.
    chance = data.draw(st.randoms(use_true_random=True), label="chance")
    failure = chance.choice([None] * 4 + [RuntimeError, KeyboardInterrupt, "hook", "function"])
    level = chance.randint(0, depth)
    actions = chance.choices(["call", "gradient", "run", "sweep"], k=chance.randint(1, 2))
    users = Users(model, chance.choices(KINDS_OF_HOOKS, k=chance.randint(1, 3)), chance)
    for module in model.modules():
        module.training = chance.random() < 0.5
    with torch.no_grad():
        clean = model(tokens)
    # Made before the footprint is taken: the donor of a transplant draws from the global generators.
    own = edit("z", torch.neg) if names[0] in ("path", "circuit") else INTERVENTIONS[names[0]](settings)
    made = [[INTERVENTIONS[name](settings) for name in block] for block in blocks]
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
    if isinstance(failure, type) or failure == "function":
        assert caught is error
    elif failure is None:
        assert caught is None
    users.raising = 0
    assert differences(before, footprint(model)) == []
    assert users.all_fire(tokens)
    with torch.no_grad():
        assert bool((model(tokens) == clean).all())


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_they_are_values_and_planning_changes_nothing(name):
    """They survive copies and pickles; one serves any model of its architecture, before and after others."""
    settings, tokens = next(iter(MODELS.values())), tokens_of(7)
    given, one, two = INTERVENTIONS[name](settings), build(**settings), build(5, **settings)
    before = footprint(one)
    given.plan(HookedModel(one))
    assert differences(before, footprint(one)) == []
    first = run(one, tokens, given)
    run(two, tokens, given)
    for other in (given, copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert other == given
        assert hash(other) == hash(given)
        assert torch.equal(run(one, tokens, other), first)
    assert "\n" not in given.label
    assert len(repr(given)) < 4000
