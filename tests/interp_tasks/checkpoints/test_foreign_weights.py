"""Weights that something else has trained: whatever the order of their axes, the model computes what it did."""

import csv
import json

import pytest
import torch
from hypothesis import given, settings, strategies
from safetensors.torch import save_file
from transformer_lens import HookedTransformerConfig

import tasks
from interp_tasks import import_checkpoint, load_checkpoint
from interp_tasks.checkpoints.run_reader import read_metrics
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from tasks.model_building import build_from_config

TASK = tasks.get("modular-addition", p=11)
CONFIG = {"act_fn": "gelu", "normalization_type": None, "attention_dir": "bidirectional"}


def stored_otherwise(model):
    """The state_dict as scripts store it whose weights act from the left, heads side by side."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("W_O"):
            tensor = tensor.flatten(0, 1).mT
        elif tensor.ndim > 1 and not name.endswith(("W_pos", "mask")):
            tensor = tensor.mT
        state[f"module.{name}"] = tensor.contiguous()
    return {"epoch": 7, "model": state}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    sizes=strategies.lists(strategies.sampled_from([3, 4, 5, 6, 7, 10]), min_size=5, max_size=5, unique=True),
    n_heads=strategies.sampled_from([1, 2]),
    n_layers=strategies.sampled_from([1, 2]),
    attn_only=strategies.booleans(),
    otherwise=strategies.booleans(),
)
def test_the_model_computes_what_it_did(tmp_path_factory, sizes, n_heads, n_layers, attn_only, otherwise):
    folder = tmp_path_factory.mktemp("weights")
    d_model, d_head, d_mlp, n_ctx, d_vocab = sizes
    config = HookedTransformerConfig(
        **CONFIG,
        n_layers=n_layers,
        d_model=d_model,
        n_ctx=n_ctx,
        d_head=d_head,
        n_heads=n_heads,
        d_mlp=None if attn_only else d_mlp,
        attn_only=attn_only,
        d_vocab=d_vocab,
        d_vocab_out=8,
        seed=0,
        device="cpu",
    )
    model = build_from_config(config)
    torch.save(stored_otherwise(model) if otherwise else model.state_dict(), folder / "model_40.pth")
    (one,) = import_checkpoint(folder / "model_40.pth", folder / "run", config=CONFIG)
    assert (one.step, bool(one.transposed), one.zeros) == (40, otherwise, ())
    read = load_checkpoint(f"{folder / 'run'}@40")
    tokens = torch.randint(d_vocab, (4, n_ctx), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(read.model(tokens), model(tokens), rtol=0, atol=0)
    assert read.task is None


def test_steps_a_log_and_the_task_make_a_run_with_its_marks(tmp_path, capsys):
    """`@pre` and `@post` need the log; a bias that a file lacks is 0."""
    models = {step: TASK.build_model(step) for step in (0, 100, 900, 1000)}
    (tmp_path / "steps").mkdir()
    # A training script's own, of no Hugging Face model.
    (tmp_path / "steps" / "config.json").write_text('{"seed": 0}')
    for step, model in models.items():
        state = {name: each for name, each in model.state_dict().items() if name != "unembed.b_U"}
        save_file(
            {name: each.contiguous() for name, each in state.items()}, tmp_path / f"steps/w{step}.safetensors"
        )
    with (tmp_path / "log.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["epoch", "val_accuracy", "train/loss"])
        writer.writerows([step, 0.05 if step < 500 else 1.0, 2.0] for step in range(0, 1001, 25))
    run = str(tmp_path / "run")
    given = ["--task", "modular-addition", "--set", "task.p=11", "--log", str(tmp_path / "log.csv")]
    assert main(["runs", "import", str(tmp_path / "steps"), "--out", run, *given, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ref"] for row in rows] == [f"{run}@{step}" for step in models]
    assert rows[0]["zeros"] == ["unembed.b_U"]
    assert load_checkpoint(f"{run}@pre").step == 100
    post = load_checkpoint(f"{run}@post")
    assert (post.step, post.task) == (1000, TASK)
    batch = TASK.sample(8)
    torch.testing.assert_close(post.model(batch.tokens), models[1000](batch.tokens))
    assert main(["modular", "progress", "--ckpt", f"{run}@post"]) == 0
    assert "does not say what it was trained on" in capsys.readouterr().out
    with (tmp_path / "log.csv").open("a") as file:
        file.write("1100,1.0,2.0\n")
    more = ["--step", "1100", "--out", run, *given]
    assert main(["runs", "import", str(tmp_path / "steps" / "w1000.safetensors"), *more]) == 0
    assert [line["step"] for line in read_metrics(run)] == [*range(0, 1001, 25), 1100]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": 1}, "holds no state_dict"),
        ({0: torch.zeros(2)}, "holds no state_dict"),
        ({"transformer.wte.weight": torch.zeros(2, 2)}, "of a Hugging Face model give the folder"),
        ({"embed.W_E": torch.zeros(12, 4)}, "W_Q' is missing"),
        ({**TASK.build_model().state_dict(), "blocks.0.more": torch.zeros(2)}, "holds blocks.0.more"),
        (object(), "save model.state_dict()"),
    ],
)
def test_what_is_no_such_file_is_one_line(tmp_path, content, said):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"w\.pt") as caught:
        import_checkpoint(tmp_path / "w.pt", tmp_path / "run", task=TASK)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_weights_do_not_tell_is_asked_for_by_name(tmp_path):
    torch.save(TASK.build_model().state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match="does not tell act_fn, normalization_type, attention_dir"):
        import_checkpoint(tmp_path / "w.pt", tmp_path / "run")
    with pytest.raises(UserError, match=r"runs import .*w\.pt --out RUN"):
        load_checkpoint(tmp_path / "w.pt")
