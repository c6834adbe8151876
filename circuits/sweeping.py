"""Many interventions on the same examples, compared with the unedited model: one call, one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from circuits.applying import attached, planned
from circuits.arguments import read_choice, read_seed
from circuits.errors import CircuitsError
from circuits.metrics import PerExample, metric_name, read_metric, read_values, unedited_metrics
from circuits.modes import evaluating
from circuits.references import References
from circuits.results import SweepResult
from circuits.snapshots import Positions, Snapshot, parse_positions, select_positions
from circuits.state import running_rows
from circuits.surface import Surface
from circuits.tabulating import BASELINE, Plans, tabulate

# Tokens per forward under chunk="auto": large enough to fill two cores, small enough to stay within cache
# and memory.
AUTO_CHUNK = 16384


def sweep(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"],
    variants: Mapping[str, Any],
    metric: Any = None,
    batch: Any = None,
    engine: str = "auto",
    chunk: int | str = "auto",
    positions: Any = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> SweepResult:
    """Run every variant on the same tokens and compare each with the unedited model.

    variants: name -> an intervention, or a tuple of them that act together.
    metric: `fn(output)`, or `fn(output, batch[rows])` where `batch` is given (it has len() and takes a
        slice). It is called once per variant and chunk, and returns a value per example [n], a pair
        (sum [n], count [n]), or a dict of those. Pairs are pooled as Σsum/Σcount over examples. Without a
        metric: `kl` (nats) and `mse` from the unedited output, which have no p-value.
    engine: "naive", one full forward per variant with plain hooks, or "auto", which picks naive.
    chunk: tokens per forward, at least one example. Results depend on it by rounding only.
    positions: the positions the metric reads. The output everywhere else is set to NaN, so that a metric
        that reads there fails. Default: all.
    seed, draws, flips: of the bootstrap over examples (95% percentile intervals, `draws` resamples shared by
        all variants) and of the sign-flip test (at most `flips` flips; exact where 2^n is no more than that).

    Inside a block of `intervene`, the edits of that block belong to the model that is compared with, while
    clean passes still run without them. Raises `CircuitsError` before any run for variants, batch or
    arguments that do not fit, and after the first one for a metric that returns another shape or a value
    that is not finite.
    """
    surface = Surface.of(model)
    read_choice(engine, ("auto", "naive"), "sweep", "engine")
    seed = read_seed(seed, "sweep")
    read = parse_positions(positions, "sweep, positions")
    plans = _read_variants(variants, surface)
    step = _read_sizes(tokens, batch, chunk)
    if isinstance(read, Snapshot):
        raise CircuitsError(
            "sweep, positions: the same positions are read in every example; got a mask [batch pos]"
        )
    if metric is not None:
        read_metric(metric, batch is not None)
    if not (int(draws) > 0 and int(flips) > 0):
        raise CircuitsError(f"sweep: draws and flips are positive numbers, got {draws} and {flips}")

    references = References(surface)
    collected: dict[str, list[PerExample]] = {name: [] for name in (BASELINE, *plans)}
    with evaluating(model), torch.no_grad():
        for start in range(0, len(tokens), step):
            rows = slice(start, min(start + step, len(tokens)))
            clean = _output(model, tokens, rows, read, BASELINE)
            examples = None if batch is None else batch[rows]
            collected[BASELINE].append(_measure(metric, clean, clean, examples, read, BASELINE))
            for name, (_, writes) in plans.items():
                references.fetch(writes)
                with attached(surface, writes, references):
                    output = _output(model, tokens, rows, read, f"variant {name!r}")
                collected[name].append(_measure(metric, output, clean, examples, read, f"variant {name!r}"))
    settings = {
        "seed": seed,
        "draws": draws,
        "flips": flips,
        "engine": "naive",
        "chunk": chunk,
    }
    settings |= {"n": len(tokens), "positions": None if read is None else list(read)}
    return tabulate(plans, collected, settings, tested=metric is not None)


def _read_variants(variants: Mapping[str, Any], surface: Surface) -> Plans:
    if not isinstance(variants, Mapping) or not variants:
        raise CircuitsError("sweep: no variants; give a dict of names and interventions")
    plans: Plans = {}
    for name, given in variants.items():
        interventions = given if isinstance(given, tuple | list) else (given,)
        if not interventions:
            raise CircuitsError(f"sweep: variant {name!r} has no intervention")
        try:
            plans[str(name)] = tuple(interventions), planned(interventions, surface)
        except CircuitsError as error:
            raise CircuitsError(f"variant {name!r}: {error}") from error
    return plans


def _read_sizes(tokens: Tensor, batch: Any, chunk: int | str) -> int:
    """Examples per forward."""
    if tokens.ndim < 2 or tokens.numel() == 0:
        raise CircuitsError(f"sweep: tokens are [batch pos], got {list(tokens.shape)}")
    if batch is not None and len(batch) != len(tokens):
        raise CircuitsError(f"sweep: tokens have {len(tokens)} examples, batch has {len(batch)}")
    if chunk == "auto":
        chunk = AUTO_CHUNK
    if isinstance(chunk, str) or chunk < 1:
        raise CircuitsError(
            f'sweep: chunk={chunk!r}; give "auto" or a number of tokens per forward, at least 1'
        )
    return max(1, chunk // tokens[0].numel())


def _output(model: Any, tokens: Tensor, rows: slice, read: Positions | None, variant: str) -> Tensor:
    with running_rows(model, rows, len(tokens)):
        output = model(tokens[rows])
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise CircuitsError(
            f"{variant}: the model's output is {type(output).__name__}, not a tensor of numbers"
        )
    if read is not None:
        outside = ~select_positions(read, output.shape[1], "sweep, positions").to(output.device)
        output = output.clone()
        output[:, outside] = 0
    if bool(output.isnan().any()):
        raise CircuitsError(f"{variant}: the output is not finite")
    if read is not None:
        output[:, outside] = float("nan")
    return output


def _measure(
    metric: Any, output: Tensor, clean: Tensor, examples: Any, read: Positions | None, variant: str
) -> PerExample:
    if metric is not None:
        values = metric(output) if examples is None else metric(output, examples)
        return read_values(values, metric_name(metric), len(output), variant)
    if read is not None:
        inside = select_positions(read, output.shape[1], "sweep, positions").to(output.device)
        output, clean = output[:, inside], clean[:, inside]
    return read_values(unedited_metrics(output, clean), "unedited", len(output), variant)
