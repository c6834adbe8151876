"""The verbs of ``circuits`` on two devices, on models of five kinds whose every part matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from circuits import (
    ablate,
    cache,
    circuit,
    compare,
    draws,
    edit,
    heads,
    intervene,
    lens,
    logit_difference,
    patch,
    patterns,
    permute,
    probe,
    prompts,
    run,
    splice,
    sweep,
    transplant,
)
from tests.campaigns.device.agreement import Check
from tests.campaigns.device.models import FEW, KINDS, LENGTH, Given, Models, Verb, check_of, loss, measures

#: What a kind of model refuses.
REFUSED = {
    ("padded prompts", "post-norm"),
    ("transplants", "gpt2"),
    ("permutations", "llama"),
    ("permutations", "pythia"),
}
VERBS: dict[str, Verb] = {}


def verb(function: Verb) -> Verb:
    VERBS[function.__name__.replace("_", " ")] = function
    return function


def each_head(given: Given) -> dict[str, Any]:
    return dict(ablate.each(ablate.zero, heads("all", given.model)))


@verb
def ablations(given: Given) -> Any:
    other, mask = given.other, given.place(given.tokens(1) > 5)
    kinds = {
        "uniform": ablate.uniform("all"),
        "keys": ablate.uniform("0.1", keys=[0, 1]),
        "queries": ablate.uniform("1.0", queries=mask),
        "zero": ablate.zero("0.1, 1.2-3"),
        "positions": ablate.zero("1.0", positions=[2, 3]),
        "mean": ablate.mean("1.0", other),
        "mean of all": ablate.mean("mlp_out.1", other, over="batch,pos"),
        "resample": ablate.resample("0.1", other, seed=2),
        "mean pattern": ablate.mean_pattern("all", other),
        "edited pattern": ablate.mean_pattern("all", other, of="edited"),
        "all but": ablate.all_but("1.0", "mean", reference=other),
        "all but, resampled": ablate.all_but("1.0", "resample", source=other),
        "stream": ablate.mean("resid_pre.1", other),
        "neurons": ablate.neurons(1, given.place(torch.arange(32) % 3 == 0)),
        "mean of neurons": ablate.neurons(1, [3, 4], how="mean", reference=other),
    }
    alone = {name: run(given.model, given.here, each) for name, each in kinds.items()}
    together = run(given.model, given.here, *(kinds[name] for name in ("mean", "resample", "zero")))
    return {"clean": run(given.model, given.here), "together": together, **alone}


@verb
def classes_and_frequencies(given: Given) -> Any:
    cells = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    # Of a bridge's words the first are the tokenizer's own, and one of them is padding.
    grid = given.place(torch.cat([cells + 3 * given.bridge, torch.full((25, 1), 9)], 1))
    sums, residues = given.place(cells.sum(1) % 5), given.place(cells % torch.tensor([2, 3]))
    edits = {
        "classes": ablate.classes("mlp_post.0", sums, grid),
        "classes kept": ablate.classes("resid_pre.1", residues, grid, keep=True),
    }
    if not given.bridge:
        waves: dict[str, Any] = {"coords": [0, 1], "period": 5, "grid": grid}
        edits |= {
            "frequencies": ablate.frequencies("mlp_post.0", [1], **waves),
            "frequencies kept": ablate.frequencies("z.1", [1, 2], keep=True, heads="1.0", **waves),
            "of the sum": ablate.frequencies("mlp_post.0", [1], directions="sum", **waves),
        }
    return {name: run(given.model, grid[::2], each) for name, each in edits.items()}


@verb
def edits_and_cache(given: Given) -> Any:
    tokens = given.here
    push = torch.linspace(-1, 1, int(given.model.cfg.d_model), dtype=torch.float64)
    found = {
        "z": run(given.model, tokens, edit("z.1", lambda z: z * 2, heads="1.2", positions=[1, 2])),
        "push": run(
            given.model,
            tokens,
            edit("resid_pre.1", lambda x: x + push.to(x), positions=given.place(tokens > 5)),
        ),
        "scores": run(given.model, tokens, edit("scores.0", lambda s: s * 0.5)),
        "pattern": run(given.model, tokens, edit("pattern.1", lambda p: p.roll(1, -1), heads="1.0")),
        "neurons": run(given.model, tokens, edit("mlp_post.0", lambda x: x + 1, neurons=[1, 2])),
    }
    with intervene(given.model, ablate.zero("0.1"), edit("mlp_out.1", lambda x: -x)):
        found["block"] = given.model(tokens.to(given.device))
        sites = ["z", "mlp_out", "pattern", "resid_post", "q", "k", "v", "embed"]
        found["cache"] = dict(cache(given.model, tokens, sites))
    return found


@verb
def gradients(given: Given) -> Any:
    with torch.enable_grad(), intervene(given.model, ablate.mean("0.1", given.other), ablate.uniform("1.0")):
        value = given.model(given.here.to(given.device))[:, -1].square().mean()
        weights = [each for each in given.model.parameters() if each.requires_grad][:4]
        return {"value": value, "gradients": list(torch.autograd.grad(value, weights))}


@verb
def generation(given: Given) -> Any:
    found = {}
    for where in (None, "prompt", "new"):
        with intervene(
            given.model,
            ablate.zero("1.0", positions=where),
            ablate.mean("0.1", given.other, over="batch,pos"),
        ):
            found[str(where)] = given.model.generate(
                given.here[:, :3].to(given.device),
                max_new_tokens=3,
                do_sample=False,
                stop_at_eos=False,
                verbose=False,
                use_past_kv_cache=given.bridge,
            )
    return found


@verb
def patches(given: Given) -> Any:
    tokens, other = given.here, given.other
    held = cache(given.model, other, ["z", "resid_pre", "pattern"])
    kinds = {
        "z": patch.activations("z", other, heads="0.1+1.0"),
        "cached": patch.activations("z", held, heads="1.1"),
        "stream": patch.activations("resid_pre.1", held, positions=given.place(tokens > 5)),
        "pattern": patch.activations("pattern.1", held),
        "elsewhere": patch.activations("resid_pre.1", other, positions=[4, 5], source_positions=[1, 2]),
        "mlp": patch.activations("mlp_out.0", other, positions=slice(2, 5)),
    }
    return {name: run(given.model, tokens, each) for name, each in kinds.items()}


@verb
def paths(given: Given) -> Any:
    other = given.other
    kinds = {
        "to q": patch.path("0.1", ("q", "1.0"), other),
        "to the output": patch.path("0.1", "output", other),
        "at positions": patch.path("embed", "output", other, positions=[2, 3]),
    }
    if not given.parallel:
        kinds["to an MLP"] = patch.path("0.2", "mlp_pre.0", other)
    alone = {name: run(given.model, given.here, each) for name, each in kinds.items()}
    return {
        "run": alone,
        "sweep": sweep(given.model, given.here, kinds, metric=measures, **given.batch).frame,
    }


@verb
def sweeps(given: Given) -> Any:
    variants = {
        **each_head(given),
        "mean": ablate.mean("0.1", given.other),
        "uniform": ablate.uniform("all"),
        "queries": ablate.uniform("1.0", queries=given.place(given.here > 5)),
        "patch": patch.activations("z", given.other, heads="0.1"),
        "drawn": draws(lambda seed: ablate.resample("1.1", given.other, seed=seed), 3),
    }

    def swept(**options: Any) -> Any:
        return sweep(given.model, given.here, variants, metric=measures, **given.batch, **options).frame

    engines = {engine: swept(engine=engine) for engine in ("auto", "naive")}
    split = {"chunk": swept(chunk=24), "memory": swept(memory=10**7)}
    return {**engines, **split, "default": sweep(given.model, given.here, each_head(given), **FEW).frame}


@verb
def sweeps_of_checkpoints(given: Given) -> Any:
    own, donor = given.model.state_dict(), given.donor.state_dict()
    states = {
        "own": {name: given.place(value) for name, value in own.items()},
        "donor": {name: value.cpu() for name, value in donor.items()},
    }
    return sweep(
        given.model, given.here, each_head(given), metric=loss, checkpoints=states, **given.batch
    ).frame


@verb
def comparison(given: Given) -> Any:
    outputs = {name: run(given.model, given.here, ablate.zero(name)) for name in ("0.1", "1.0")}
    answers = logit_difference(given.here[:, 0], given.place((given.here[:, 0] + 1) % 11), position=5)
    return {
        "compare": compare([(run(given.model, given.here), outputs)], metric=measures, **given.batch).frame,
        "answers": sweep(given.model, given.here, each_head(given), metric=answers, **FEW).frame,
    }


def edges(given: Given, exact: Any = 5, **options: Any) -> Any:
    return patch.edges(given.model, given.here, given.other, loss, exact=exact, **given.batch, **options)


@verb
def edges_ranked(given: Given) -> Any:
    return {method: edges(given, method=method).frame for method in ("integrated", "gradient")}


@verb
def screens(given: Given) -> Any:
    def screened(*sites: str, **options: Any) -> Any:
        return patch.screen(
            given.model, given.here, given.other, loss, *sites, exact=3, **given.batch, **options
        ).frame

    found = {method: screened(method=method) for method in ("integrated", "gradient")}
    attributed = {
        site: patch.attribution(given.model, given.here, given.other, loss, site, **given.batch).frame
        for site in ("z", "mlp_out", "resid_pre", "v")
    }
    return {**found, "neurons": screened("mlp_post", by="neuron"), **attributed}


@verb
def circuits(given: Given) -> Any:
    found, third = edges(given), given.tokens(3)
    top = found.top(15)
    options: dict[str, Any] = {"batch": third, **FEW}
    tested = circuit.evaluate(
        given.model, {"top": top}, third, given.other, loss, random=2, subsets=2, greedy=1, **options
    )
    curve = circuit.curve(
        given.model, {"found": found}, third, given.other, loss, sizes=[3, 10], batch=third, draws=50
    )
    nodes = circuit.nodes(["0.1", "1.0", "mlp1", "embed"], given.model)
    kept = {
        "keep": top.keep(given.other),
        "cut": top.cut(given.other),
        "mean": top.keep(given.other, how="mean"),
        "zero": top.keep(how="zero"),
        "nodes": nodes.keep(given.other),
    }
    runs = {name: run(given.model, given.here, each) for name, each in kept.items()}
    return {"evaluate": tested.frame, "curve": curve.frame, **runs}


@verb
def probes(given: Given) -> Any:
    tokens = given.tokens(4, 48)
    words = probe.linear(
        given.model,
        tokens,
        {"here": given.place(tokens % 3), "last": given.place(tokens.roll(1, 1) % 3)},
        ["resid_pre.0", "resid_post"],
        kind="classification",
        positions=range(1, LENGTH),
        untrained=given.donor,
        splits={"late": given.place(torch.arange(LENGTH) > 3)},
        ridge=1.0,
    )
    value = given.place(tokens.double())
    numbers = probe.linear(
        given.model, tokens, {"value": value}, ["z", "mlp_post"], ridge=(0.1, 1.0), intercept=True
    )
    weights = {str(name): fitted.weight for name, fitted in numbers.weights.items()}
    return {"words": words.frame, "numbers": numbers.frame, "weights": weights}


@verb
def lenses(given: Given) -> Any:
    found, edited = lens(given.model, given.here), lens(given.model, given.here, ablate.zero("0.0-1"))
    return {
        "readouts": dict(found.readouts),
        "contributions": dict(found.contributions),
        "constant": found.constant,
        "edited": dict(edited.contributions),
    }


@verb
def attention(given: Given) -> Any:
    tokens, late = given.here, range(3, LENGTH)
    seen = patterns.marked(given.place(tokens > 5))
    templates = {
        "previous": patterns.previous(LENGTH),
        "first": patterns.constant(LENGTH, 0),
        "same": lambda tokens: tokens[:, None, :] == tokens[:, :, None],
        "marked": seen,
        "marked row": patterns.row(2, 3) & seen,
    }
    scores = patterns.scores(given.model, tokens, templates, queries=late, draws=50)
    maps = patterns.attention(given.model, tokens, queries=given.place(tokens > 5))
    moved = patterns.movement(given.model, tokens, given.other, queries=late, draws=50)
    groups = given.place(torch.arange(LENGTH) % 2)
    change = given.place(torch.arange(len(tokens)) % 2)
    follow = patterns.follow(given.model, tokens, given.other, groups, change, 1 - change, draws=50)
    return {
        "mean": maps.mean,
        "diffuseness": maps.diffuseness,
        "scores": scores.frame,
        "kinds": patterns.classify(scores).frame,
        "movement": moved.frame,
        "follow": follow.frame,
    }


@verb
def transplants(given: Given) -> Any:
    parts = ("attn", "mlp", "qkv", "unembed")
    variants = {part: transplant.weights(given.donor, part) for part in parts}
    variants["layer"] = transplant.weights(given.donor, ["q", "o"], layers=1)
    state = {name: given.place(value) for name, value in given.donor.state_dict().items()}
    variants["state"] = transplant.weights(state, "mlp")
    return sweep(given.model, given.here, variants, metric=measures, **given.batch).frame


@verb
def permutations(given: Given) -> Any:
    variants = {
        "drawn": permute.draws(3),
        "one": permute.positions([1, 0, *range(2, LENGTH)]),
        "slices": permute.slices((2, 3), 0),
    }
    return sweep(given.model, given.here, variants, metric=measures, **given.batch).frame


@verb
def padded_prompts(given: Given) -> Any:
    def made(side: str, rows: list[list[int]]) -> Any:
        return prompts(given.model, rows, side=side)

    found = {}
    for side in ("left", "right"):
        here = made(side, [[3, 4], [5, 6, 7, 8], [4, 3, 5, 6, 7]])
        other = made(side, [[7, 4], [3, 6, 4, 8], [8, 3, 9, 6, 7]])
        variants = {
            "zero": ablate.zero("0.1", positions=[-1]),
            "uniform": ablate.uniform("all"),
            "mean": ablate.mean("1.0", other),
            "patch": patch.activations("resid_pre.1", other, positions=[-1]),
        }
        answers = logit_difference(3, 4)
        found[side] = {
            "run": {name: run(given.model, here, each) for name, each in variants.items()},
            "cache": dict(cache(given.model, here, ["z", "pattern"])),
            "sweep": sweep(given.model, here, variants, metric=answers, **FEW).frame,
            "edges": patch.edges(given.model, here, other, answers, exact=3, **FEW).frame,
        }
    return found


class Autoencoder(nn.Module):
    """Random features of the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(2, width, 40, generator=generator, dtype=torch.float64) / width**0.5
        self.read, self.write = nn.Parameter(drawn[0]), nn.Parameter(drawn[1].T.contiguous())

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.read).relu()

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.write


@verb
def features(given: Given) -> Any:
    sae, site = Autoencoder(int(given.model.cfg.d_model)).to(given.device), "features.resid_post.0"
    with splice(given.model, {"resid_post.0": sae}):
        edits = {
            "zero": ablate.features("resid_post.0", range(8)),
            "mean": ablate.features("resid_post.0", range(8), how="mean", reference=given.other),
            "error": ablate.zero("error.resid_post.0"),
            "patch": patch.activations(site, given.other, features=[3, 4]),
        }
        options: dict[str, Any] = {"by": "feature", "exact": 3, **given.batch}
        return {
            "run": {name: run(given.model, given.here, each) for name, each in edits.items()},
            "cache": dict(cache(given.model, given.here, site)),
            "screen": patch.screen(given.model, given.here, given.other, loss, site, **options).frame,
        }


def checks(scratch: Path) -> list[Check]:
    """Returns the checks of every verb on every kind of model that does not refuse it."""
    models = Models(scratch)
    pairs = [(name, kind) for name in VERBS for kind in KINDS if (name, kind) not in REFUSED]
    return [check_of(VERBS[name], name, models, kind) for name, kind in pairs]
