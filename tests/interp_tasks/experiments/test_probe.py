"""`interp-run probe` and its experiment: what it asks of a task, against scikit-learn on plain caches of the model."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

import tasks
from interp_tasks.checkpoints import load_checkpoint, save_checkpoint
from interp_tasks.experiments import probe
from interp_tasks.measurement.loaded_checkpoints import subjects
from interp_tasks.measurement.options_and_examples import Examples
from interp_tasks.measurement.untrained_models import build_untrained

MATRIX, ADDITION = "zoo:matrix-completion-4x4@post", "zoo:modular-addition-113@post"


def rows(frame, against="shuffled targets", **where):
    found = frame[frame["intervention"].str.endswith(against)]
    for name, wanted in where.items():
        found = found[found[name] == wanted]
    return found


def one(frame, column="value", **where):
    (value,) = rows(frame, **where)[column]
    return value


@pytest.fixture(scope="module")
def shipped():
    return probe(MATRIX, samples=400, seed=1)


def test_numbers_of_a_shipped_model_are_those_of_scikit_learn(shipped):
    checkpoint = load_checkpoint(MATRIX)
    batch = checkpoint.task.sample(400, seed=1)
    hidden = batch.extras["hidden"]
    _, cache = checkpoint.model.run_with_cache(batch.tokens)
    held_out = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:100].sort().values
    train = torch.ones(400, dtype=torch.bool)
    train[held_out] = False
    x_matrix = batch.targets.unflatten(1, (4, 4))
    masked = x_matrix.masked_fill(hidden.unflatten(1, (4, 4)), 0)
    u = np.linalg.svd(x_matrix.double().numpy())[0][:, :, 0]
    by_position = {
        "true_element": batch.targets[..., None].double(),
        "masked_row": masked[:, torch.arange(16) // 4].double(),
        "left_projector": torch.from_numpy(u[:, :, None] * u[:, None]).reshape(400, 1, 16).expand(-1, 16, -1),
    }
    for name, target in by_position.items():
        for layer in range(3):
            activation = cache[f"blocks.{layer}.hook_resid_post"].detach().double()
            fitted = LinearRegression(fit_intercept=False).fit(
                activation[train].flatten(0, 1), target[train].flatten(0, 1)
            )
            predicted = fitted.predict(activation[held_out].flatten(0, 1)).reshape(-1, target.shape[2])
            true = target[held_out].flatten(0, 1).numpy()
            for split, chosen in (("", hidden | True), (" (hidden)", hidden), (" (observed)", ~hidden)):
                inside = chosen[held_out].flatten().numpy()
                variant = f"{name} resid_post.{layer}"
                error = one(shipped.frame, variant=variant, metric=f"mse{split}")
                assert error == pytest.approx(((predicted - true)[inside] ** 2).mean(), rel=1e-5)
                r2 = r2_score(true[inside], predicted[inside], multioutput="variance_weighted")
                assert one(shipped.frame, variant=variant, metric=f"r2{split}") == pytest.approx(r2, abs=1e-5)
                if name == "masked_row":
                    p, t = torch.from_numpy(predicted[inside]), torch.from_numpy(true[inside])
                    kept = t.norm(dim=1) > 0
                    cosine = torch.nn.functional.cosine_similarity(p[kept], t[kept]).abs().mean().item()
                    assert one(shipped.frame, variant=variant, metric=f"abs_cosine{split}") == pytest.approx(
                        cosine, rel=1e-5
                    )


def test_the_untrained_model_is_one_of_this_architecture_and_initialisation(tmp_path):
    for ref, scale in ((MATRIX, 0.1), ("zoo:matrix-completion-4x4-small-init@post", 0.02)):
        (subject,) = subjects(ref, Examples(samples=4))
        model = build_untrained(subject)
        assert {n: p.shape for n, p in model.named_parameters()} == {
            n: p.shape for n, p in subject.model.named_parameters()
        }
        assert model.W_Q.std().item() == pytest.approx(scale, rel=0.05), "as run.json says"
        assert torch.equal(model.W_Q, build_untrained(subject).W_Q)
        assert not torch.equal(
            model.W_Q, build_untrained(next(subjects(ref, Examples(samples=4, seed=1)))).W_Q
        )
    task = tasks.get("matrix-completion", n=3, rank=1)
    settings = task.Model(n_layers=2, n_heads=2, d_model=8, d_mlp=12, d_head=3, n_ctx=11, act_fn="relu")
    alone = save_checkpoint(tmp_path / "alone", task.build_model(0, settings), task)
    (subject,) = subjects(str(alone), Examples(samples=4))
    model = build_untrained(subject)
    for name in ("d_head", "d_mlp", "n_ctx", "act_fn", "attention_dir", "normalization_type", "n_layers"):
        assert getattr(model.cfg, name) == getattr(subject.model.cfg, name)
