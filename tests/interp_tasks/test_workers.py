"""Pools of processes: nothing outlives the process that began it, and its end is one line."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PARENT = """
import os, sys, time
from interp_tasks.cli.streams_and_exit_codes import run_for_exit_code
from interp_tasks.worker_pool import worker_pool

def work():
    with worker_pool(2) as pool:
        if sys.argv[1] == "early":
            print(os.getpid(), flush=True)
        running = [pool.submit(time.sleep, 60) for _ in range(2)] if sys.argv[1] == "early" else []
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60).result()

sys.exit(run_for_exit_code(work, debug=False))
"""


@pytest.mark.parametrize(
    ("sent", "early", "status", "told"),
    [
        (signal.SIGKILL, False, -9, None),
        (signal.SIGTERM, False, 143, "interp-run: ended by SIGTERM\n"),
        (signal.SIGHUP, False, 129, "interp-run: ended by SIGHUP\n"),
        (signal.SIGINT, True, 130, "interp-run: interrupted\n"),
    ],
)
def test_workers_do_not_outlive_their_parent(tmp_path, sent, early, status, told):
    script = tmp_path / "parent.py"
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(PARENT, '    ')}")
    with subprocess.Popen(
        [sys.executable, str(script), "early" if early else "late"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What a shell or nohup has it ignore is ignored by what it starts, too.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as parent:
        known = int(parent.stdout.readline())
        # A terminal's Ctrl-C reaches all processes of its group, those too that are starting.
        (os.killpg if early else os.kill)(parent.pid, sent)
        # Whoever holds stderr open would keep this waiting.
        stderr = parent.communicate(timeout=60)[1]
        # Of a killed process Python's own tracker of semaphores says what it cleans up.
        assert told is None or stderr == told
    assert parent.returncode == status
    deadline = time.monotonic() + 30
    while is_running(known):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False
