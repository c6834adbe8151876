"""Ctrl-C at a random instant of every verb that edits a model: afterwards the model is what it was.

A trial draws a verb and an instant of its run, and interrupts it there (SIGINT, as a notebook's stop button does; a
quarter of the trials a second time shortly after). Then weights and buffers hold the bits of before, no hook and no
attribute of ours is left, modes and the mode of gradients and the SIGINT handler are as before, and the model's own
output and that of the next verb are the same. The error is held meanwhile, as a notebook holds the last one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from circuits import ablate, cache, heads, intervene, lens, patch, run, splice, sweep, transplant
from circuits.model.state import modules_of
from tests.campaigns.frame import Campaign, Trials, expect
from tests.campaigns.threads import FEW, total
from tests.circuits.conftest import FAMILIES, build

Verb = Callable[[Any], Any]


def verbs(tokens: Tensor, other: Tensor, donor: nn.Module) -> dict[str, Verb]:
    """What is interrupted, by name, of a model."""
    state = donor.state_dict()
    copied = transplant.weights(donor, ["qkv"])
    autoencoder = (lambda x: 2 * x, lambda features: features / 3)

    def block(model: Any, *edits: Any) -> None:
        with intervene(model, *edits):
            model(tokens)

    def nested(model: Any) -> None:
        with intervene(model, copied):
            run(model, tokens, ablate.mean("1.1", reference=other))

    def spliced(model: Any) -> None:
        with splice(model, {"resid_post.0": autoencoder}):
            run(model, tokens, ablate.zero("0.1"))

    variants = {**ablate.each(ablate.zero, ["0.0", "0.1"]), "transplant": copied}
    return {
        "run": lambda model: run(model, tokens, ablate.zero("0.1")),
        "run, mean": lambda model: run(model, tokens, ablate.mean("0.1", reference=other)),
        "run, transplant": lambda model: run(model, tokens, copied),
        "run, path": lambda model: run(model, tokens, patch.path("0.1", "1.2", source=other)),
        "cache": lambda model: cache(model, tokens, ["z", "resid_post"]),
        "block, transplant": lambda model: block(model, copied),
        "block, activations": lambda model: block(model, ablate.zero("0.1"), ablate.uniform("1.0")),
        "block, nested": nested,
        "splice": spliced,
        "sweep": lambda model: sweep(model, tokens, variants, metric=total, **FEW),
        "sweep, naive": lambda model: sweep(model, tokens, variants, metric=total, engine="naive", **FEW),
        "sweep, checkpoints": lambda model: sweep(
            model,
            tokens,
            {"0.0": ablate.zero(heads("0.0", model))},
            metric=total,
            checkpoints={"a": state},
            **FEW,
        ),
        "patch.edges": lambda model: patch.edges(model, tokens, other, total, steps=1, exact=1, **FEW),
        "patch.attribution": lambda model: patch.attribution(model, tokens, other, total, **FEW),
        "lens": lambda model: lens(model, tokens),
    }


def condition(model: nn.Module) -> dict[str, Any]:
    """What an interrupt must leave as it is, beside the weights."""
    modules = modules_of(model)
    return {
        "hooks": [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in modules],
        "attributes": [sorted(vars(one)) for one in modules],
        "forwards": [id(vars(one).get("forward")) for one in modules],
        "parameters": [id(one) for one in model.parameters()],
        "modes": [one.training for one in modules],
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "handler": signal.getsignal(signal.SIGINT),
    }


class Clock:
    """Sends SIGINT, which is what is tried, to this thread when the alarm clock rings, at most `left` times."""

    left = 0

    def __call__(self, *_: Any) -> None:
        if self.left:
            self.left -= 1
            signal.raise_signal(signal.SIGINT)


@contextmanager
def alarms() -> Iterator[Clock]:
    clock = Clock()
    before = signal.signal(signal.SIGALRM, clock)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield clock
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, interrupt)


class Subject:
    """A model in training mode, and what it is before any interrupt."""

    def __init__(self, family: str, tokens: Tensor) -> None:
        self.family, self.tokens = family, tokens
        self.model: Any = build(3, family).train()
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.next_edit = ablate.zero("1.2")
        run(self.model, tokens, self.next_edit)  # what is made once per model
        self.condition = condition(self.model)
        self.output, self.edited = self.outputs()

    def outputs(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.model(self.tokens), run(self.model, self.tokens, self.next_edit)

    def damage(self) -> str:
        """Says what an interrupt has left behind; empty where nothing."""
        now = condition(self.model)
        found = [name for name, value in self.condition.items() if now[name] != value]
        torch.set_grad_enabled(True)
        weights = self.model.state_dict()
        found += ["weights"] * any(not torch.equal(weights[name], one) for name, one in self.weights.items())
        try:
            output, edited = self.outputs()
        except Exception as error:
            return ", ".join([*found, f"the next run: {error}"])
        found += ["output"] * (not torch.equal(output, self.output))
        found += ["the next verb"] * (not torch.equal(edited, self.edited))
        return ", ".join(found)


@contextmanager
def prepared(scratch: Path) -> Iterator[Trials]:
    tokens, other = (
        torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)
    )
    lasted: dict[tuple[str, str], float] = {}

    def trial(number: int) -> Sequence[str]:
        generator = np.random.default_rng(number)
        at = number % len(subjects)
        subject = subjects[at]
        name = str(generator.choice(list(made[subject.family])))
        verb = made[subject.family][name]
        if (subject.family, name) not in lasted:
            verb(subject.model)
            start = time.perf_counter()
            verb(subject.model)
            lasted[subject.family, name] = time.perf_counter() - start
        instant = generator.uniform(1e-5, lasted[subject.family, name])
        again = generator.uniform(1e-5, 1e-3) if generator.random() < 0.25 else 0.0
        held: BaseException | None = None
        clock.left = 2
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, instant, again)
                verb(subject.model)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as error:
            held = error
        what = subject.damage()
        if what:
            subjects[at] = Subject(subject.family, tokens)
        expect(not what, f"{subject.family}, {name}: {what}")
        return [f"{name}: {'ended before' if held is None else 'interrupted'}"]

    with alarms() as clock:
        subjects = [Subject(family, tokens) for family in FAMILIES]
        made = {subject.family: verbs(tokens, other, build(5, subject.family)) for subject in subjects}
        yield Trials(trial)


CAMPAIGN = Campaign("interrupts", __doc__ or "", prepared, usual=2000)
