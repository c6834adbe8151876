"""Runs within runs (a hook that calls the model), and runs whose inputs are not seen."""

import pytest
import torch

from circuits import ablate, patch, run

INTERVENTIONS = {
    "path": lambda tokens, source, grid: patch.path("0.1", "resid_post.1", source=source),
    "path, keys and queries": lambda tokens, source, grid: patch.path("z.0", "q.1", source=source),
    "frequencies": lambda tokens, source, grid: ablate.frequencies("z.0", 1, (0, 1), 3, grid=grid),
    "uniform": lambda tokens, source, grid: ablate.uniform("all"),
    "mean": lambda tokens, source, grid: ablate.mean("all", reference=source),
}


@pytest.fixture
def grid():
    """All pairs of 0, 1, 2 at the first two of six positions."""
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    return torch.cat([pairs, torch.full((9, 4), 3)], 1)


def calling(model, tokens, sites):
    """A hook at each site that runs the model on other tokens, once in each outermost run."""
    running = []

    def call(activation, hook):
        if not running:
            running.append(True)
            try:
                model(tokens)
            finally:
                running.clear()

    names = {
        "embed": "hook_embed",
        "scores": "blocks.1.attn.hook_attn_scores",
        "last": "ln_final.hook_normalized",
    }
    for site in sites:
        model.add_hook(names[site], call)


@pytest.mark.parametrize("name", INTERVENTIONS)
@pytest.mark.parametrize("site", ["embed", "scores", "last"])
def test_a_hook_that_runs_the_model_changes_nothing(
    make_model, hooked_only, tokens, other_tokens, grid, name, site, assert_same
):
    model, inside = make_model(), other_tokens.flip(0)
    given = grid[[4, 8, 1, 5]] if name == "frequencies" else tokens
    one = INTERVENTIONS[name](tokens, other_tokens, grid)
    expected, alone = run(model, given, one), run(model, given)
    calling(model, grid if name == "frequencies" else inside, [site])
    assert_same(run(model, given, one), expected, alone)
