"""A run folder: one writer, one config, resumed from its newest whole checkpoint."""

import subprocess
import sys
import time

import pytest
import torch

from interp_tasks.checkpoints import RunFolder, load_checkpoint, read_metrics, read_run, stored_steps
from interp_tasks.errors import UserError
from tests.interp_tasks.checkpoints.models import build

CONFIG = {
    "task": {"name": "toy", "n": 3},
    "model": {"d_model": 4},
    "train": {"steps": 100, "learning_rate": 0.1, "seed": 0},
}


def config(**train):
    return {**CONFIG, "train": {**CONFIG["train"], **train}}


def state(step):
    return {"momentum": torch.full((3,), step / 3)}


def write(run, steps):
    for step in steps:
        run.log({"step": step, "validation": {"loss": 1 / (1 + step)}})
        run.save(step, build(step), None, state(step), metrics={"loss": step})


def opened(path, **train):
    return RunFolder.open(path, config(**train), {"seed": 0})


def refusal(path, described=None):
    with pytest.raises(UserError) as caught, RunFolder.open(path, described or CONFIG, {}):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_mangled_newest_checkpoint_is_passed_over(tmp_path):
    path = tmp_path / "run"
    with opened(path) as run:
        write(run, [0, 10, 20])
    (path / "checkpoints" / "00000020" / "model.safetensors").write_bytes(b"torn")
    with opened(path) as run:
        point = run.resume()
        assert point.step == 10
        assert [line["step"] for line in read_metrics(path)] == [0, 10]
        write(run, [20])
    assert load_checkpoint(f"{path}@20").step == 20
    kept = sorted(file.parent.name for file in path.rglob("training_state.safetensors"))
    assert kept == ["00000010", "00000020"], "the newest alone, and that of this run"


def test_without_any_state_nothing_is_removed(tmp_path):
    path = tmp_path / "run"
    with opened(path) as run:
        write(run, [0, 10])
    for step in (0, 10):
        (path / "checkpoints" / f"{step:08d}" / "training_state.safetensors").unlink()
    with opened(path) as run, pytest.raises(UserError, match=r"up to step 10 but no training state"):
        run.resume()
    assert stored_steps(path) == [0, 10]
    assert len(read_metrics(path)) == 2


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "run"
    with opened(path) as run:
        write(run, [0, 10])
        run.log({"step": 11})
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'\x00\x00\n{"step": 12}\n{"step": 1')  # as after a power cut
    with opened(path) as run:
        assert run.resume() is not None
        assert [line["step"] for line in read_metrics(path)] == [0, 10]
        run.log({"step": 12})
    assert [line["step"] for line in read_metrics(path)] == [0, 10, 12]


def test_metrics_mangled_before_the_checkpoint_stop_the_run(tmp_path):
    path = tmp_path / "run"
    with opened(path) as run:
        write(run, [0, 10, 20])
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:9], lines[2], ""]))
    with opened(path) as run, pytest.raises(UserError, match=r"metrics.jsonl is mangled: line 2"):
        run.resume()
    assert stored_steps(path) == [0, 10, 20]


def test_what_is_not_finite_is_logged_as_null(tmp_path):
    with opened(tmp_path / "run") as run:
        run.log({"step": 0, "loss": float("nan"), "norms": [torch.tensor(2.0), float("inf")]})
        with pytest.raises(ValueError, match="integer step"):
            run.log({"loss": 1.0})
        with pytest.raises(TypeError, match=r"line\.what is a object"):
            run.log({"step": 1, "what": object()})
    assert read_metrics(tmp_path / "run") == [{"step": 0, "loss": None, "norms": [2.0, None]}]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (config(learning_rate=0.2), "train.learning_rate: 0.1 there, 0.2 asked for"),
        (config(clip=1.0), "train.clip: '(not set)' there, 1.0 asked for"),
        (
            {**CONFIG, "task": {"name": "other", "n": 4}},
            "task.name: 'toy' there, 'other' asked for; task.n: 3",
        ),
    ],
)
def test_another_config_is_refused(tmp_path, changed, expected):
    with opened(tmp_path / "run") as run:
        write(run, [0])
    before = (tmp_path / "run" / "run.json").read_bytes()
    message = refusal(tmp_path / "run", changed)
    assert expected in message
    assert message.endswith("choose another --out")
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    with opened(tmp_path / "run"):
        pass


def test_what_differs_between_openings_is_recorded(tmp_path):
    for version in ("1", "1", "2"):
        with RunFolder.open(tmp_path / "run", CONFIG, {"torch": version, "seed": 0}):
            pass
    described = read_run(tmp_path / "run")
    assert (described["torch"], [set(entry) for entry in described["resumed"]]) == (
        "1",
        [{"at"}, {"at", "torch"}],
    )


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    assert "is not a run folder and holds 'thesis.txt'" in refusal(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["thesis.txt"]
    assert "is a file, not a run folder" in refusal(tmp_path / "thesis.txt")
    assert "cannot write" in refusal(tmp_path / "thesis.txt" / "run")


def test_a_mangled_run_json(tmp_path):
    with opened(tmp_path):
        pass
    (tmp_path / "run.json").write_text("{")
    assert "run.json is not valid JSON" in refusal(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 9}')
    assert "is not a run of this version (format 9)" in refusal(tmp_path)


HOLDER = """
import sys, time
from pathlib import Path
from interp_tasks.file_io import acquire_folder_lock
lock = acquire_folder_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_two_processes_contend_and_a_killed_one_never_blocks(tmp_path):
    with opened(tmp_path / "run"):
        pass
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            assert f"(pid {holder.pid})" in refusal(tmp_path / "run")
        finally:
            holder.kill()
    started = time.monotonic()
    with opened(tmp_path / "run"):
        assert time.monotonic() - started < 5


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    # Killed before its run.json.
    (path / ".lock").write_text("123\n")
    (path / f".run.json.tmp-{'a' * 32}").write_text('{"form')
    with opened(path) as run:
        assert run.resume() is None
        write(run, [0])
    unfinished = path / "checkpoints" / f".00000010.tmp-{'0' * 32}"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    (path / f".run.json.tmp-{'f' * 32}").write_text("{")
    (path / ".keep.tmp-notes").write_text("a user's own")
    with opened(path):
        pass
    left = sorted(entry.name for entry in path.iterdir())
    assert left == [".keep.tmp-notes", ".lock", "checkpoints", "metrics.jsonl", "run.json"]
    assert [entry.name for entry in (path / "checkpoints").iterdir()] == ["00000000"]
