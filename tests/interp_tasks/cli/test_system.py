"""``interp-run`` and the system around it: streams, encodings, terminals, files, disks, locks."""

import contextlib
import errno
import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from interp_tasks import file_io
from interp_tasks.checkpoints.checkpoint_refs import ZOO_FOLDER
from interp_tasks.cli import main

ZOO = "zoo:matrix-completion-4x4"
SMALL = ["--samples", "6", "--quiet"]
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
EVIL = "r\x1b[31m\x9b1m\u202eun"
RUN = "import sys; from interp_tasks.cli import main; sys.exit(main())"


def refused(outcome):
    """The one line of a refusal."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("interp-run: ")
    assert err.count("\n") == 1
    return err


def copied(tmp_path, name):
    """A shipped run under another name."""
    shutil.copytree(ZOO_FOLDER / ZOO.removeprefix("zoo:"), tmp_path / name)
    return name


@pytest.mark.parametrize(
    ("command", "format"),
    [("runs checkpoints", "table"), ("heads", "table"), ("heads", "json"), ("heads", "csv")],
)
def test_no_name_reaches_a_terminal_as_it_obeys_it(call, tmp_path, command, format):
    """Of a folder, and of a group of heads; in JSON it comes back whole."""
    run = copied(tmp_path, EVIL)
    rest = (
        ["--ckpt", f"{run}@post", "--group", f"{EVIL}=0.0", *SMALL] if command == "heads" else ["--ckpt", run]
    )
    code, out, err = call(*command.split(), *rest, "--format", format)
    assert (code, err) == (0, "")
    assert not OBEYED.search(out)
    if format == "json":
        assert any(EVIL in str(value) for value in json.loads(out)[0].values())
    elif format == "csv":
        assert r"r\u001b[31m\u009b1m\u202eun" in out
    else:
        assert r"\x1b[31m" in out.replace("\n", "")


def ablate(call, *arguments, seed=0):
    return call("ablation", "--ckpt", f"{ZOO}@post", *SMALL, "--seed", seed, *arguments)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def full_after(monkeypatch, count):
    """The disk takes so many more files."""
    left, real = iter(range(count)), file_io.write_synced

    def write_synced(*arguments):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(file_io, "write_synced", write_synced)


def test_a_full_disk_keeps_the_old_files_and_the_table(call, tmp_path, monkeypatch):
    assert ablate(call, "--out", "out", "--plot")[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    full_after(monkeypatch, 4)
    code, out, err = ablate(call, "--out", "out", "--plot", seed=1)
    assert code == 2
    assert err.startswith("interp-run: cannot write out/ablation.")
    assert err.endswith(": No space left on device; name a folder you can write to\n")
    assert err.count("\n") == 1
    assert f"{ZOO}@post · step 20000 · 6 test examples, seed 1" in out
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def shell(command, **environment):
    """(exit code of the program, stdout, stderr); ``interp-run`` stands for it."""
    program = f"{sys.executable} -c '{RUN}'"
    done = subprocess.run(
        ["bash", "-c", command.replace("interp-run", program)],
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("interp-run tasks >&-", 0, b"", b""),
        (
            "interp-run --help >/dev/full",
            2,
            b"",
            b"interp-run: the system refuses: No space left on device\n",
        ),
        ("interp-run ablation 2>&-", 2, b"", b""),
        ("interp-run ablation 2>/dev/full", 2, b"", b""),
        ("interp-run tasks >&- 2>&-", 0, b"", b""),
        ("interp-run tasks --format json | head -c 1; exit ${PIPESTATUS[0]}", 0, b"[", b""),
        # More than a pipe holds, whatever the reader's speed.
        ("interp-run tasks --format json | (exec <&-; sleep 1); exit ${PIPESTATUS[0]}", 141, b"", b""),
        ("interp-run tasks <&- | head -c 4", 0, b"task", b""),
    ],
)
def test_streams_of_a_shell(command, code, out, err):
    assert shell(command) == (code, out, err)


def test_data_is_escaped_not_replaced(monkeypatch):
    """A name of the user's comes back whole from JSON in any encoding."""
    rows = {}
    for encoding in ("ascii", "utf-8"):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        assert main(["heads", "--ckpt", ZOO, "--group", "ä·→😀=0.0", *SMALL, "--format", "json"]) == 0
        rows[encoding] = json.loads(written.getvalue())
        assert b"\xc3" in written.getvalue() if encoding == "utf-8" else written.getvalue().isascii()
    assert rows["ascii"] == rows["utf-8"]
    assert rows["ascii"][-1]["variant"] == "ä·→😀"


def on_a_terminal(arguments, columns, cwd, **environment):
    """(exit code, what was shown) on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**kept, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal's end is an error on Linux
        while part := os.read(ours, 4096):
            seen += part
    os.close(ours)
    return process.wait(), seen


def unstyled(seen):
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", seen).decode()


def test_a_terminal_of_80_columns(tmp_path):
    code, seen = on_a_terminal(["lens", "--ckpt", f"{ZOO}@pre", "--samples", "6"], 80, tmp_path)
    assert code == 0, seen.decode()
    plain = unstyled(seen)
    lines = [part for line in plain.split("\r\n") for part in line.split("\r")]
    assert max(map(len, lines)) <= 80
    assert "…" not in plain
    assert "starting" in plain, "the bar, while libraries are imported"
    assert "Traceback" not in plain
    assert any(line.startswith("read-out after") for line in lines)


def test_windows_is_refused_in_one_line():
    windows = "import sys; sys.platform = 'win32'; "
    told = "interp_tasks needs Linux or macOS: on Windows, install it in WSL"

    def run(code):
        return subprocess.run([sys.executable, "-c", windows + code], capture_output=True, text=True)

    command = run("from interp_tasks.cli import main; sys.exit(main(['runs', 'zoo']))")
    assert (command.returncode, command.stdout, command.stderr) == (2, "", f"interp-run: {told}\n")
    assert run("import interp_tasks; interp_tasks.train").stderr.endswith(f"UserError: {told}\n")
    # `circuits` and `tasks` run there.
    assert run("import circuits, interp_tasks; print('fine')").stdout == "fine\n"
