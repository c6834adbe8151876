"""What no machine could train, and what could not be read back, is refused before any work."""

import pytest

from circuits import intervene, transplant
from interp_tasks.checkpoints.save import save_checkpoint
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from tasks import get


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            "matrix-completion --set train.grokfast=ma --set train.grokfast_window=1000000000",
            "training takes ",
        ),
        ("matrix-completion --set task.n=2000", "training takes "),
        ("matrix-completion --set model.n_layers=1000000", "of memory at least, and cpu has"),
        ("matrix-completion --set train.batch_size=1000000000", "training takes "),
        ("matrix-completion --set task.scale=1e300", "task.scale: "),
        ("matrix-completion --out zoo:x", "choose a name without @ and zoo:"),
        ("matrix-completion --out @7", "choose a name without @ and zoo:"),
        ("matrix-completion --out runs/a@last", "choose a name without @ and zoo:"),
    ],
)
def test_what_cannot_be_trained_is_one_line(tmp_path, monkeypatch, capsys, call, said):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *call.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_being_edited_is_not_stored(tmp_path):
    task = get("modular-addition", p=5)
    model, other = task.build_model(0), task.build_model(1)
    with (
        intervene(model, transplant.weights(other, ["mlp"])),
        pytest.raises(UserError, match="end the block"),
    ):
        save_checkpoint(tmp_path / "mixture", model, task)
    save_checkpoint(tmp_path / "own", model, task)
