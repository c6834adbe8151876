"""`ablate.classes` against class means by hand, against `ablate.frequencies`, and against least squares."""

import numpy as np
import pytest
import torch

from circuits import ablate, cache, prompts, run

P = 7
X = torch.arange(P)
EXAMPLES = torch.cat([torch.cartesian_prod(X, X), torch.full((P * P, 1), P)], 1)
EXAMPLES = EXAMPLES[torch.randperm(P * P, generator=torch.Generator().manual_seed(0))]
NUMBER = EXAMPLES[:, 0] + P * EXAMPLES[:, 1]


@pytest.fixture
def small(family, make_model):
    return make_model(family=family, d_vocab=P + 1, n_ctx=3, n_layers=1)


SITE, HOOK = "mlp_post.0", "blocks.0.mlp.hook_post"


def under(model, edit, tokens=EXAMPLES):
    return run(model, tokens, edit, cache=[HOOK])[1][HOOK]


def test_each_example_loses_what_its_class_adds_to_the_mean(small):
    clean = cache(small, EXAMPLES, HOOK)[HOOK]
    rows = torch.tensor([5, 5, 40, 1])
    expected = clean.clone()
    for r in range(5):
        mine = r == NUMBER % 5
        expected[mine] -= clean[mine].mean(0) - clean.mean(0)
    found = under(small, ablate.classes(SITE, NUMBER % 5, EXAMPLES), EXAMPLES[rows])
    torch.testing.assert_close(found, expected[rows])
    kept = under(small, ablate.classes(SITE, NUMBER % 5, EXAMPLES, keep=True), EXAMPLES[rows])
    torch.testing.assert_close(kept, (clean - expected + clean.mean(0))[rows])
    assert (clean - expected).abs().max() > 0.01 * clean.std()


def test_several_kinds_are_removed_as_least_squares_fits_them(small):
    kinds = torch.stack([NUMBER % 5, EXAMPLES[:, 0] % 3], 1)
    clean = cache(small, EXAMPLES, HOOK)[HOOK]
    columns = torch.cat([torch.nn.functional.one_hot(kind) for kind in kinds.T], 1).numpy().astype(float)
    flat = clean.flatten(1).double().numpy()
    fit = columns @ np.linalg.lstsq(columns, flat, rcond=1e-10)[0]
    found = under(small, ablate.classes(SITE, kinds, prompts(small, EXAMPLES))).flatten(1).numpy()
    np.testing.assert_allclose(found, flat - fit + flat.mean(0), atol=1e-5)
