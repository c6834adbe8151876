"""One run on several processes: the same gradients, whoever computes them; one writer; no one waits for the dead."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tasks
from interp_tasks import UserError, train
from interp_tasks.checkpoints import read_metrics, read_run, stored_steps
from interp_tasks.cli.app import main
from interp_tasks.errors import ProcessLost, Stopped
from interp_tasks.training.distributed import Processes
from interp_tasks.training.dropout import Dropout
from interp_tasks.training.launch import Launch, launched

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or not torch.distributed.is_gloo_available(), reason="needs fork and gloo"
)
SECONDS = 100
TINY = {"d_model": 8, "n_heads": 2}
HARD = {
    "batch_size": 7,
    "grokfast": "ema",
    "dropout": 0.2,
    "clip_norm": 0.05,
    "weight_decay": 0.1,
    "l1": 1e-4,
    "checkpoint_every": 4,
    "log_every": 3,
    "threads": 1,
}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(count: int, work: Callable[[int], None], folder: Path) -> list[int]:
    """Processes with the environment that torchrun gives, forked: torch is imported once. Their output in files."""
    port = free_port()
    pids = []
    for rank in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks beside threads, which these processes do not touch
            pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        status = 70
        try:
            for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                stream.flush()
                file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1 if name == "out" else 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
            }
            status = work(rank) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pids


def wait(pids: list[int]) -> list[int]:
    """Exit statuses; whoever takes too long is killed."""
    found: dict[int, int] = {}
    end = time.monotonic() + SECONDS
    while len(found) < len(pids):
        for pid in pids:
            if pid not in found and (done := os.waitpid(pid, os.WNOHANG))[0]:
                found[pid] = os.waitstatus_to_exitcode(done[1])
        if time.monotonic() > end:
            for pid in set(pids) - found.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [found[pid] for pid in pids]


def together(count: int, work: Callable[[int], None], folder: Path) -> None:
    statuses = wait(start(count, work, folder))
    said = "".join((folder / f"err-{rank}").read_text() for rank in range(count))
    assert statuses == [0] * count, said


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"{step:08d}" / "model.safetensors")


def assert_same_runs(one: Path, other: Path, step: int, tolerance: float) -> None:
    """Equal to ``tolerance`` of how far the weights have moved."""
    found, expected, begun = weights(one, step), weights(other, step), weights(other, 0)
    moved = max((expected[name] - begun[name]).abs().max().item() for name in expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance * moved, msg=name)
    assert moved > 1e-3


class Ratio(tasks.task_class("matrix-completion")):
    """Matrix completion whose loss is of hidden entries alone: Σ error / Σ count, of which a share has any number."""

    name = "test-ratio"

    def loss(self, output, batch):
        error, count = self.metrics(output, batch)["mse_masked"]
        return error.sum() / count.sum()


@pytest.fixture
def ratio():
    return Ratio(n=2, rank=1, grid_max=1, grid_step=0.1)


@pytest.fixture
def addition():
    return tasks.get("modular-addition", p=7)


def own_model(task, **settings):
    """In float64, every parameter drawn."""
    model = task.build_model(0, task.Model(**TINY, **settings)).double()
    stream = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
    return model


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_are_those_of_the_whole_batch(ratio, tmp_path, count):
    """Float64, to 1e-10: seven examples in shares of three or four, and a loss that is no mean of theirs."""
    config = {"steps": 3, "batch_size": 7, "optimizer": "sgd", "learning_rate": 0.5, "threads": 1}
    settings = {"n_layers": 2, "normalization": "LN", "biases": "trained"}
    one = train(ratio, out=tmp_path / "one", model=own_model(ratio, **settings), config=config)

    def work(rank):
        train(ratio, out=tmp_path / "several", model=own_model(ratio, **settings), config=config)

    together(count, work, tmp_path)
    several = tmp_path / "several"
    for step in (1, 3):
        assert_same_runs(several, one, step, 1e-10)
    for line, expected in zip(read_metrics(several), read_metrics(one), strict=True):
        assert line["train"] == pytest.approx(expected["train"], rel=1e-10)
        assert line["validation"] == pytest.approx(expected["validation"], rel=1e-10)
        assert line["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-10)
    # That a share's own loss would not have done: shares hide different numbers of entries.
    batch = ratio.sample(7, seed=tasks.derive_seed(0, "batch", 0), split="train")
    assert batch[:3].extras["hidden"].sum() / 3 != batch[3:].extras["hidden"].sum() / 4
    assert read_run(several)["processes"] == {"count": count, "backend": "gloo"}
    assert read_run(one)["processes"] is None


@pytest.mark.parametrize("masks", ["per-sample", "shared"])
def test_everything_an_update_does(addition, tmp_path, masks):
    """Dropout, Grokfast, clipping, the penalty on weights, the task's own batches; float64, to 1e-8 after ten steps."""
    config = {**HARD, "steps": 10, "dropout_masks": masks, "gradient_norms_every": 5}
    one = train(addition, out=tmp_path / "one", model=own_model(addition), config=config)

    def work(rank):
        train(addition, out=tmp_path / "two", model=own_model(addition), config=config)

    together(2, work, tmp_path)
    assert_same_runs(tmp_path / "two", one, 10, 1e-8)
    norms = [
        next(line["gradient_norm"] for line in read_metrics(run) if "gradient_norm" in line)
        for run in (tmp_path / "two", one)
    ]
    for stage in ("raw", "filtered"):
        assert norms[0][stage] == pytest.approx(norms[1][stage], rel=1e-9, abs=1e-12)


def test_whole_splits_are_shared_and_any_number_of_processes_goes_on(addition, tmp_path):
    """Two, then one, then three, for whom two examples to validate on are too few; an observer writes once."""
    config = {**HARD, "batch_size": None, "eval_samples": 2, "observe": ("hook_embed",), "observe_every": 4}
    one = train(addition, out=tmp_path / "one", settings=TINY, config={**config, "steps": 12})
    out = tmp_path / "run"
    torch.manual_seed(99)

    def until(steps):
        return lambda rank: (
            train(addition, out=out, settings=TINY, config={**config, "steps": steps}) and None
        )

    together(2, until(4), tmp_path)
    until(8)(0)
    together(3, until(12), tmp_path)
    # Float32: to 1e-4 of how far the weights have moved.
    assert_same_runs(out, one, 12, 1e-4)
    assert stored_steps(out) == stored_steps(one)
    counts = [(entry.get("processes") or {}).get("count") for entry in read_run(out)["resumed"]]
    assert counts == [None, 3]
    assert len(read_metrics(out)) == len(read_metrics(one))
    assert sorted(path.name for path in (out / "activations").iterdir()) == sorted(
        path.name for path in (one / "activations").iterdir()
    )


def test_the_forward_of_the_model_itself_is_shared_too(addition, tmp_path):
    """An architecture without a fused forward."""
    config = {"steps": 3, "batch_size": 6, "threads": 1}

    def model():
        found = own_model(addition, n_layers=2)
        found.cfg.output_logits_soft_cap = 30.0
        return found

    one = train(addition, out=tmp_path / "one", model=model(), config=config)
    assert read_run(one)["forward"]["kind"] == "hooked"
    together(
        2,
        lambda rank: train(addition, out=tmp_path / "two", model=model(), config=config) and None,
        tmp_path,
    )
    assert_same_runs(tmp_path / "two", one, 3, 1e-9)


def cli(*arguments: str) -> int:
    return main(["train", "modular-addition", "--set", "task.p=7", "--set", "model.d_model=8", *arguments])


def said(folder: Path, name: str, count: int = 2) -> list[str]:
    return [(folder / f"{name}-{rank}").read_text() for rank in range(count)]


def test_the_first_process_alone_speaks(tmp_path):
    arguments = ["--seeds", "0:2", "--set", "train.steps=2", "--out", str(tmp_path / "run")]
    together(2, lambda rank: cli(*arguments), tmp_path)
    out = said(tmp_path, "out")
    printed = [line.split("  ")[:2] for line in out[0].splitlines()]
    assert printed == [[f"{tmp_path}/run/seed-{seed}@last", "step 2"] for seed in (0, 1)]
    assert out[1] == ""
    assert said(tmp_path, "err") == ["", ""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.batch_size=1"], "a batch of 1 examples for 2 processes: at least one each"),
        (["--set", "train.step=2"], "no setting train.step: did you mean train.steps"),
        (["--seeds", "0:2", "--stacked"], "--stacked trains in one process"),
        (["--device", "cuda:1"], "--device cuda:1 is one for 2 processes: write cpu or cuda"),
    ],
)
def test_mistakes_are_one_line_of_one_process(tmp_path, arguments, message):
    statuses = wait(start(2, lambda rank: cli(*arguments, "--out", str(tmp_path / "run")), tmp_path))
    first, second = said(tmp_path, "err")
    assert statuses == [2, 2], first + second
    assert message in first
    assert first.count("\n") == 1
    assert second == ""
    assert not (tmp_path / "run").exists()


def test_a_folder_that_the_first_process_cannot_have_stops_all(addition, tmp_path):
    train(addition, out=tmp_path / "run", settings={"d_model": 16}, config={"steps": 1})
    statuses = wait(
        start(2, lambda rank: cli("--set", "train.steps=1", "--out", str(tmp_path / "run")), tmp_path)
    )
    first, second = said(tmp_path, "err")
    assert statuses == [2, 2], first + second
    assert "was made by another config" in first
    assert second == ""


def test_other_commands_are_of_one_process(tmp_path):
    statuses = wait(start(2, lambda rank: main(["tasks"]), tmp_path))
    assert statuses == [2, 2]
    assert said(tmp_path, "err") == [
        "interp-run: tasks list is of one process: only train is started by torchrun\n",
        "",
    ]


@pytest.mark.parametrize("dying", [0, 1])
def test_a_process_that_dies_ends_the_others_and_the_run_goes_on(addition, tmp_path, dying):
    config = {**HARD, "steps": 14}
    whole = train(addition, out=tmp_path / "whole", settings=TINY, config=config)

    class Dies:
        """Asked after every update: the fifth is the last."""

        def __init__(self, rank):
            self.rank, self.left = rank, 5

        def __call__(self):
            self.left -= 1
            if not self.left and self.rank == dying:
                os.kill(os.getpid(), signal.SIGKILL)
            return False

    def work(rank):
        try:
            train(addition, out=tmp_path / "run", settings=TINY, config=config, stop=Dies(rank))
        except ProcessLost as error:
            print(error, file=sys.stderr)
            return 2
        return 0

    statuses = wait(start(2, work, tmp_path))
    assert statuses[dying] == -signal.SIGKILL
    other = said(tmp_path, "err")[1 - dying]
    assert statuses[1 - dying] == 2, other
    assert other == (
        f"process {1 - dying} of 2 stops: another process of this run has gone; "
        "the same command goes on from the last checkpoint\n"
    )
    assert stored_steps(tmp_path / "run") == [0, 1, 2, 4]
    train(addition, out=tmp_path / "run", settings=TINY, config=config)
    assert_same_runs(tmp_path / "run", whole, 14, 1e-4)


def test_one_process_that_is_asked_to_stop_stops_all(addition, tmp_path):
    config = {**HARD, "steps": 14}

    def work(rank):
        asked = iter([False] * 5 + [rank == 1])
        with pytest.raises(Stopped, match="stopped after step 6 of 14"):
            train(addition, out=tmp_path / "run", settings=TINY, config=config, stop=lambda: next(asked))

    together(2, work, tmp_path)
    whole = train(addition, out=tmp_path / "whole", settings=TINY, config=config)
    together(
        2,
        lambda rank: train(addition, out=tmp_path / "run", settings=TINY, config=config) and None,
        tmp_path,
    )
    assert_same_runs(tmp_path / "run", whole, 14, 1e-4)


@pytest.mark.parametrize(("examples", "count"), [(7, 2), (2, 3), (12, 5), (1, 1)])
def test_shares_are_the_whole(examples, count):
    shares = [Processes(Launch(rank, count, rank)).share(examples) for rank in range(count)]
    assert [row for first, last in shares for row in range(first, last)] == list(range(examples))
    sizes = [last - first for first, last in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_share_has_the_rows_of_the_whole_mask():
    whole = Dropout(0.3, "per-sample", 3, 5, 6).kept(7, 4, 0, "resid_mid")
    part = Dropout(0.3, "per-sample", 3, 5, 6, share=(2, 5, 7)).kept(3, 4, 0, "resid_mid")
    assert torch.equal(part, whole[2:5])


def test_what_the_environment_says(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == Launch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (None, "2", "first", "1"):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(UserError, match="start several processes by torchrun, or unset WORLD_SIZE"):
            launched()
    monkeypatch.setenv("MASTER_ADDR", "here")
    for port in ("abc", "0", "99999"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(UserError, match="MASTER_PORT do not go with it"):
            launched()
    monkeypatch.setenv("MASTER_PORT", "1")
    assert launched() == Launch(rank=1, count=2, local_rank=1)


@pytest.mark.parametrize(
    ("rank", "says"), [("0", True), ("1", False), ("5", True), ("a", True), ("-1", True)]
)
def test_of_several_processes_the_first_says_it_and_whoever_is_none_of_them(rank, says, monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1", "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "nothing"]) == 2
    assert capsys.readouterr().err.count("interp-run: ") == says


def test_who_waits_for_nobody_can_be_interrupted(tmp_path):
    """No signal reaches Python while torch waits."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal\n"
        "from interp_tasks.training.launch import launched\n"
        "from interp_tasks.training.distributed import join\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "print('waits', flush=True)\n"
        "join(launched(), 'cpu')\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with subprocess.Popen(
        [sys.executable, script], env=os.environ | place, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "waits\n"
            # Not SIGINT, which background shells have their children ignore. Until torch waits, Python answers.
            deadline = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < deadline:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            assert process.poll() is not None
        finally:
            process.kill()
