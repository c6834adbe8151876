"""Eight threads on one model: every call gives the numbers that it gives alone, or an error in one line.

A trial is eight calls at once, each drawn from all that runs a model: ``run``, ``cache``, blocks of ``intervene``,
``sweep`` on both engines and over checkpoints, ``patch.*``, ``lens``, ``probe``, attention maps, on a model, on another
one that has its blocks, and on one that has nothing of it. The model's own call, ``model(tokens)`` outside any block,
runs beside them; it takes no turn, so that nothing is promised of it, and what comes of it is counted apart.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from circuits import (
    CircuitsError,
    ablate,
    cache,
    heads,
    intervene,
    lens,
    patch,
    patterns,
    probe,
    run,
    sweep,
    transplant,
)
from tests.campaigns.frame import Campaign, Trials, expect
from tests.circuits.conftest import FAMILIES, build

THREADS = 8
#: Seconds within which a trial ends, or hangs.
LONGEST = 600
FEW: dict[str, Any] = {"draws": 5, "flips": 5}

OWN = "the model's own call"

Call = Callable[[Any], Any]


def total(output: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).reshape(output.shape[1:])
    return (output * weights).flatten(1).sum(1)


def calls(tokens: Tensor, other: Tensor, donor: nn.Module, apart: nn.Module) -> dict[str, Call]:
    """What is called, by name, of a model; `apart` has nothing of it."""
    state = donor.state_dict()

    def block(model: Any) -> Any:
        with intervene(model, ablate.uniform("0.1"), ablate.zero("1.2")):
            return [model(tokens), run(model, other, ablate.zero("0.3"))]

    def donated(model: Any) -> Any:
        with intervene(model, transplant.weights(donor, ["qkv"])):
            return [model(tokens), run(model, tokens, ablate.mean("1.1", reference=other))]

    def variants(model: Any) -> dict[str, Any]:
        return {"source": patch.activations("z.0", other), **ablate.each(ablate.zero, heads("0.0-2", model))}

    def crossed(one: Any, two: Any) -> Any:
        with intervene(one, ablate.zero("0.1")):
            return [one(tokens), run(two, tokens, ablate.zero("0.2"))]

    return {
        OWN: lambda model: model(tokens),
        "run": lambda model: run(model, tokens, ablate.uniform("0.1, 1.0")),
        "run, path": lambda model: run(model, tokens, patch.path("0.1", "1.2", source=other)),
        "cache": lambda model: [*cache(model, tokens, ["z", "pos_embed"]).values()],
        "intervene": block,
        "intervene, weights": donated,
        "two models": lambda model: crossed(model, apart),
        "two models, the other first": lambda model: crossed(apart, model),
        "sweep": lambda model: sweep(model, tokens, variants(model), metric=total, **FEW).frame,
        "sweep, naive": lambda model: (
            sweep(model, tokens, variants(model), metric=total, engine="naive", **FEW).frame
        ),
        "sweep, checkpoints": lambda model: (
            sweep(
                model,
                tokens,
                variants(model),
                metric=total,
                checkpoints={str(n): state for n in range(3)},
                **FEW,
            ).frame
        ),
        "patch.attribution": lambda model: patch.attribution(model, tokens, other, total, **FEW).frame,
        "patch.screen": lambda model: (
            patch.screen(model, tokens, other, total, steps=2, exact=3, **FEW).frame
        ),
        "patch.edges": lambda model: patch.edges(model, tokens, other, total, steps=1, exact=1, **FEW).frame,
        "lens": lambda model: [*lens(model, tokens).contributions.values()],
        "probe": lambda model: probe.linear(model, tokens, tokens.double(), **FEW_PROBES).frame,
        "attention": lambda model: patterns.attention(model, tokens).mean,
        "transplant": lambda model: [x.tensor for _, x in transplant.weights(model, ["qkv"]).values],
    }


FEW_PROBES: dict[str, Any] = {"draws": 5, "shuffles": 0, "test": 4}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, pd.DataFrame):
        numbers, expected = (frame.select_dtypes("number").to_numpy(float) for frame in (one, other))
        return numbers.shape == expected.shape and np.allclose(numbers, expected, 1e-9, 1e-9, equal_nan=True)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


def came(result: Any, expected: Any) -> str:
    """What came of a call of which nothing is promised."""
    if isinstance(result, CircuitsError):
        return "refused"
    if isinstance(result, Exception):
        return f"not promised, {type(result).__name__}"
    return "as alone" if same(result, expected) else "not promised, other numbers than alone"


@contextmanager
def prepared(scratch: Path) -> Iterator[Trials]:
    tokens, other = (
        torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)
    )
    found: list[tuple[str, list[nn.Module], dict[str, Call], dict[tuple[int, str], Any]]] = []
    for family in FAMILIES:
        model = build(3, family)
        alike = [model]
        if family == "HookedTransformer":
            sharing = build(4, family)
            sharing.blocks = model.blocks
            sharing.setup()
            alike.append(sharing)
        made = calls(tokens, other, build(5, family), build(6, family))
        expected = {
            (which, name): call(one) for which, one in enumerate(alike) for name, call in made.items()
        }
        found.append((family, alike, made, expected))

    def trial(number: int) -> Sequence[str]:
        generator = np.random.default_rng(number)
        family, alike, made, expected = found[number % len(found)]
        drawn = [
            (int(generator.integers(len(alike))), str(generator.choice(list(made)))) for _ in range(THREADS)
        ]
        results: dict[int, Any] = {}
        begin = threading.Barrier(THREADS)

        def work(at: int) -> None:
            which, name = drawn[at]
            begin.wait()
            try:
                results[at] = made[name](alike[which])
            except Exception as error:
                results[at] = error

        threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONGEST)
        expect(len(results) == THREADS, f"{family}: {drawn} did not end")
        kinds = []
        for at, (which, name) in enumerate(drawn):
            result = results[at]
            if name == OWN:
                kinds.append(f"{name}: {came(result, expected[which, name])}")
            elif isinstance(result, Exception):
                one_line = isinstance(result, CircuitsError) and "\n" not in str(result)
                expect(one_line, f"{family}, {name}: {type(result).__name__}: {result}")
                kinds.append(f"{name}: refused")
            else:
                expect(same(result, expected[which, name]), f"{family}, {name}: other numbers than alone")
                kinds.append(f"{name}: as alone")
        for which, one in enumerate(alike):
            expect(same(one(tokens), expected[which, OWN]), f"{family}: the model has changed")
        return kinds

    before = sys.getswitchinterval()
    # Threads take turns often, also within a layer.
    sys.setswitchinterval(1e-5)
    try:
        yield Trials(trial)
    finally:
        sys.setswitchinterval(before)


CAMPAIGN = Campaign("threads", __doc__ or "", prepared, usual=250)
