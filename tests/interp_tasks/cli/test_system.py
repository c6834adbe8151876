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
import types
from pathlib import Path

import numpy
import pytest

from circuits import CircuitsError
from interp_tasks import disk
from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.cli import main
from interp_tasks.cli.app import every_command, program
from interp_tasks.cli.failures import exit_code_of
from interp_tasks.cli.streams import FOR_PEOPLE, FOR_PROGRAMS, STDOUT
from interp_tasks.cli.tables import title
from interp_tasks.disk import lock_folder
from interp_tasks.texts import LONGEST

ZOO = "zoo:matrix-completion-4x4"
SMALL = ["--samples", "6", "--quiet"]
FILES = [f"ablation.{suffix}" for suffix in ("config.json", "csv", "json", "parquet")]
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
EVIL = "r\x1b[31m\x9b1m\u202eun"
RUN = "import sys; from interp_tasks.cli import main; sys.exit(main())"
COMMANDS = {" ".join(path): made for path, made in every_command(program())}


def refused(outcome):
    """The one line of a refusal."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("interp-run: ")
    assert err.count("\n") == 1
    return err


TOKENS = {
    "floats": (lambda: numpy.ones((2, 16)), "whole numbers"),
    "no rows": (lambda: numpy.ones((0, 16), int), "[0, 16]"),
    "too large": (lambda: numpy.full((2, 16), 10**6), "1000000"),
    "too long": (lambda: numpy.ones((2, 17), int), "17 positions"),
    "objects": (lambda: numpy.array([{}], dtype=object), ".npy file of plain numbers"),
}


@pytest.mark.parametrize("kind", TOKENS)
def test_tokens_that_cannot_be(call, tmp_path, kind):
    made, said = TOKENS[kind]
    numpy.save(tmp_path / "tokens.npy", made(), allow_pickle=True)
    assert said in refused(call("ablation", "--ckpt", ZOO, "--tokens", "tokens.npy", "--quiet"))


def copied(tmp_path, name):
    """A shipped run under another name."""
    shutil.copytree(zoo_folder() / ZOO.removeprefix("zoo:"), tmp_path / name)
    return name


@pytest.mark.parametrize("format", ["table", "json", "csv"])
@pytest.mark.parametrize("command", ["runs checkpoints", "heads"])
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


def test_what_a_terminal_would_obey_is_shown_not_sent(call):
    assert "\x1b" not in refused(call("runs", "checkpoints", "--ckpt", "r\x1b[31mun"))
    assert "\\x1b[31m" in refused(call("tasks", "--import", "r\x1b[31m.py"))


def files_of(command):
    """Its arguments and options that take a file to read."""
    # What ends in .html is written.
    return [
        each
        for each in COMMANDS[command].params
        if re.search(r"\.(toml|npy|py)\b", str(each.metavar)) and each.name != "help"
    ]


def required(command):
    """Values for the options that it cannot do without."""
    return [
        word
        for option in COMMANDS[command].params
        if option.required
        for word in (option.opts[0], ZOO)
        if option.param_type_name == "option"
    ]


@pytest.mark.parametrize("command", [command for command in COMMANDS if files_of(command)])
def test_what_may_never_end_is_not_read(call, tmp_path, command):
    """Pipes, devices, folders, files of a terabyte, in the place of every file that a command takes."""
    for option in files_of(command):
        suffix = re.search(r"\.\w+", option.metavar)[0]
        os.mkfifo(tmp_path / f"{option.name}{suffix}")
        (tmp_path / f"folder{option.name}{suffix}").mkdir()
        for name in (f"{option.name}{suffix}", "/dev/zero", f"folder{option.name}{suffix}"):
            given = [name] if option.param_type_name == "argument" else [option.opts[0], name]
            needed = [] if option.param_type_name == "argument" else ["matrix-completion"]
            takes = any(each.param_type_name == "argument" for each in COMMANDS[command].params)
            line = refused(call(*command.split(), *(needed if takes else []), *required(command), *given))
            # Some commands run on no tokens of one's own, or look at the task first.
            assert re.search(
                "no regular file|it is a folder|Is a directory|--tokens out|is for models of", line
            ), line


@pytest.mark.parametrize("exit", ["sys.exit(0)", "raise SystemExit(3)"])
def test_a_file_that_exits_is_refused(call, tmp_path, exit):
    (tmp_path / "mine.py").write_text(f"import sys\n{exit}\n")
    assert "--import mine.py, line 2: SystemExit" in refused(call("tasks", "--import", "mine.py"))


def test_a_task_that_exits_is_refused(call, tmp_path):
    """And not exit status 0 with nothing done."""
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "from tasks import register\n"
        "from tasks.modular_arithmetic import ModularAddition\n"
        "@register('exits')\n"
        "class Exits(ModularAddition):\n"
        "    def sample(self, *given, **more): sys.exit(0)\n"
    )
    small = ["--set", "task.p=5", "--set", "model.d_model=8", "--set", "model.n_heads=2", "--out", "run"]
    line = refused(call("train", "exits", "--import", "mine.py", *small))
    assert "mine.py, line 6, in sample, ends the program (SystemExit: 0)" in line


def test_a_grid_on_a_full_disk_names_its_file(call, tmp_path, monkeypatch):
    """And not stdout, on which there is room."""
    real = disk.write_synced

    def full(path, content):
        if path.parent.name == "units":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(disk, "write_synced", full)
    (tmp_path / "few.toml").write_text(
        '[train]\ntask = "modular-addition"\nset = { "task.p" = 5, "train.steps" = 1, "model.d_model" = 8 }\n'
    )
    line = refused(call("grid", "few.toml", "--executor", "serial", "--quiet"))
    assert re.search(r"cannot write .*\w+\.json: No space left on device", line)
    assert not list(tmp_path.glob("grids/few/units/.*"))


def test_a_refusal_of_circuits_is_as_short_as_any(capsys):
    def refusing():
        raise CircuitsError(f"no head {'x' * 10_000}; heads are " + "0.1, " * 1000 + "\x1b[31m")

    assert exit_code_of(refusing, debug=False) == 2
    line = capsys.readouterr().err
    assert line.startswith("interp-run: no head xxx")
    assert len(line) == LONGEST + len("interp-run: \n")
    assert line.endswith("\\x1b[31m\n")


def test_a_run_in_use(call, tmp_path):
    (tmp_path / "run").mkdir()
    lock = lock_folder(tmp_path / "run")
    try:
        assert str(os.getpid()) in refused(
            call(
                "train",
                "matrix-completion",
                "--set",
                "train.steps=0",
                "--set",
                "model.d_model=8",
                "--out",
                "run",
            )
        )
    finally:
        lock.release()


def test_unicode_in_every_path(call, tmp_path):
    out = tmp_path / "größe →"
    arguments = ("--set", "train.steps=0", "--set", "model.d_model=8", "--set", "train.eval_samples=4")
    code, printed, err = call("train", "matrix-completion", *arguments, "--out", out, "--quiet")
    assert (code, err) == (0, "")
    assert f"{out}@last" in printed
    code, printed, _ = call("ablation", "--ckpt", f"{out}@0", *SMALL, "--out", out / "résultats", "--plot")
    assert code == 0
    assert f"{out}@0" in printed
    assert json.loads((out / "résultats/ablation.json").read_text(encoding="utf-8"))[0]["ref"] == f"{out}@0"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "run/meta.json"),
            "run/meta.json: Permission denied",
        ),
        (OSError(errno.EIO, "Input/output error", b"b\xc3\xb6se"), "böse: Input/output error"),
        (OSError(errno.ENOSPC, "No space left on device", STDOUT), "stdout: No space left on device"),
    ],
)
def test_what_the_system_refuses_is_one_line(capsys, error, said):
    def refusing():
        raise error

    assert exit_code_of(refusing, debug=False) == 2
    assert (
        capsys.readouterr().err == f"interp-run: cannot {'write to' if 'stdout' in said else 'use'} {said}\n"
    )


def test_an_os_error_of_a_programs_own_is_not_dressed_up():
    def broken():
        raise OSError("a bug")

    with pytest.raises(OSError, match="a bug"):
        exit_code_of(broken, debug=False)


def ablate(call, *arguments, seed=0):
    return call("ablation", "--ckpt", f"{ZOO}@post", *SMALL, "--seed", seed, *arguments)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_page_of_an_earlier_result_goes(call, tmp_path):
    assert ablate(call, "--out", "out", "--plot")[0] == 0
    (tmp_path / "out" / "heads.html").write_text((tmp_path / "out" / "ablation.html").read_text())
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert ablate(call, "--out", "out", seed=1)[0] == 0
    assert names("out") == [*FILES, "heads.html", "mine.txt"], "only the page of this command goes"
    assert ablate(call, "--out", "out", "--plot", seed=1)[0] == 0
    assert "ablation.html" in names("out")


def test_a_page_that_is_not_ours_stays(call, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ablation.html").write_text("<html>my notes</html>")
    assert ablate(call, "--out", "out")[0] == 0
    assert names("out") == sorted([*FILES, "ablation.html"])
    assert (tmp_path / "out" / "ablation.html").read_text() == "<html>my notes</html>"


def test_a_page_alone_is_not_put_beside_files_of_another_result(call):
    assert ablate(call, "--plot")[0] == 0
    assert names(".") == ["ablation.html"]
    assert ablate(call, "--plot", seed=1)[0] == 0
    assert ablate(call, "--out", ".")[0] == 0
    assert names(".") == FILES
    assert "--out ." in refused(ablate(call, "--plot"))
    assert ablate(call, "--plot", "--out", ".", seed=1)[0] == 0
    assert json.loads(Path("ablation.json").read_text())[0]["seed"] == 1


def full_after(monkeypatch, count):
    """The disk takes so many more files."""
    made = []
    real = disk.write_synced

    def write_synced(*arguments):
        made.append(1)
        if len(made) > count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(disk, "write_synced", write_synced)


@pytest.mark.parametrize("count", [0, 4])
def test_a_full_disk_keeps_the_old_files_and_the_table(call, tmp_path, monkeypatch, count):
    assert ablate(call, "--out", "out", "--plot")[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    full_after(monkeypatch, count)
    code, out, err = ablate(call, "--out", "out", "--plot", seed=1)
    assert code == 2
    assert err.startswith("interp-run: cannot write out/ablation.")
    assert err.endswith(": No space left on device; name a folder you can write to\n")
    assert err.count("\n") == 1
    assert f"{ZOO}@post · step 20000 · 6 test examples, seed 1" in out
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_failing_page_leaves_the_table_too(call, monkeypatch):
    full_after(monkeypatch, 0)
    code, out, err = ablate(call, "--plot", "--format", "json")
    assert (code, err) == (
        2,
        "interp-run: cannot write ablation.html: No space left on device; name a folder you can write to\n",
    )
    assert out
    assert len(json.loads(out)) == 3
    assert names(".") == []


SAID = {
    "help": ["--help"],
    "ablation": ["ablation", "--ckpt", ZOO, *SMALL],
    "train": [
        *("train", "matrix-completion", "--set", "train.steps=0", "--set", "model.d_model=8"),
        *("--set", "train.eval_samples=4", "--out", "run", "--quiet"),
    ],
}


@contextlib.contextmanager
def stdout_is(monkeypatch, kind):
    """A stdout that cannot be written to."""
    if kind == "closed":
        stream = None
    elif kind == "full":
        stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    else:
        reading, writing = os.pipe()
        os.close(reading)
        stream = open(writing, "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    try:
        yield
    finally:
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


FAILING = {
    "closed": (2, "interp-run: cannot write to stdout: Bad file descriptor\n"),
    "full": (
        2,
        "interp-run: cannot write to stdout: No space left on device\n",
    ),
    "broken pipe": (141, ""),
}


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("case", SAID)
def test_a_stdout_that_fails(capsys, tmp_path, monkeypatch, case, kind):
    monkeypatch.chdir(tmp_path)
    with stdout_is(monkeypatch, kind):
        before = sys.stdout
        code = main(SAID[case])
        assert sys.stdout is before
    assert (code, capsys.readouterr().err) == FAILING[kind]
    if case == "train":
        assert (tmp_path / "run" / "checkpoints" / "00000000" / "meta.json").is_file()


@pytest.mark.parametrize("kind", FAILING)
def test_of_two_failures_the_files_are_told(capsys, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    full_after(monkeypatch, 0)
    with stdout_is(monkeypatch, kind):
        code = main([*SAID["ablation"], "--out", "out"])
    assert code == 2
    assert (
        capsys.readouterr().err == "interp-run: cannot write out/ablation.parquet: No space left on device; "
        "name a folder you can write to\n"
    )


@pytest.mark.parametrize("stream", [None, "/dev/full"])
def test_a_stderr_that_fails_loses_nothing(capsys, tmp_path, monkeypatch, stream):
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full if stream else None)
        assert main(["ablation", "--ckpt", ZOO, "--samples", "6", "--out", "out"]) == 0
        assert "mse_masked" in capsys.readouterr().out
        assert names("out") == FILES
        assert main(["ablation"]) == 2
        assert main(["nothing"]) == 2


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
        ("interp-run tasks >&-", 2, b"", b"interp-run: cannot write to stdout: Bad file descriptor\n"),
        (
            "interp-run --help >/dev/full",
            2,
            b"",
            b"interp-run: cannot write to stdout: No space left on device\n",
        ),
        ("interp-run ablation 2>&-", 2, b"", b""),
        ("interp-run ablation 2>/dev/full", 2, b"", b""),
        ("interp-run tasks >&- 2>&-", 2, b"", b""),
        ("interp-run tasks --format json | head -c 1; exit ${PIPESTATUS[0]}", 0, b"[", b""),
        # More than a pipe holds, whatever the reader's speed.
        ("interp-run tasks --format json | (exec <&-; sleep 1); exit ${PIPESTATUS[0]}", 141, b"", b""),
        ("interp-run tasks <&- | head -c 4", 0, b"task", b""),
    ],
)
def test_streams_of_a_shell(command, code, out, err):
    assert shell(command) == (code, out, err)


def test_no_file_takes_the_place_of_a_closed_stdout():
    """What is printed to descriptor 1, by a C library say, must not end up in a file of ours."""
    program = (
        'import os, sys; from interp_tasks.cli import main; main(["tasks"]); '
        'sys.exit(open("/dev/null").fileno() < 3)'
    )
    assert shell(f"{sys.executable} -c '{program}' >&- <&- 2>&-")[0] == 0


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("case", SAID)
def test_an_encoding_that_lacks_characters(capsys, tmp_path, monkeypatch, case, encoding):
    monkeypatch.chdir(tmp_path)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert main(SAID[case]) == 0
    assert capsys.readouterr().err == ""
    text = written.getvalue().decode(encoding)
    if encoding == "ascii":
        assert "?" not in text
        assert "\\u" not in text, "nothing of ours needs an escape"
    if case == "ablation":
        assert f"step 20000 {'|' if encoding == 'ascii' else '·'} 6 test" in text
    assert sys.stdout.errors == "strict", "as it was"


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


@pytest.mark.parametrize(
    ("text", "people", "programs"),
    [
        ("a·b", "a|b", "a\\u00b7b"),
        ("ä·→", "\\u00e4|>", "\\u00e4\\u00b7\\u2192"),
        ("\udcff😀", *2 * (r"\udcff\ud83d\ude00",)),
    ],
)
def test_what_stands_in_for_a_character(text, people, programs):
    assert text.encode("ascii", FOR_PEOPLE).decode() == people
    assert text.encode("ascii", FOR_PROGRAMS).decode() == programs


def test_the_c_locale():
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    for command in ("--help", f"runs checkpoints --ckpt {ZOO}"):
        code, out, err = shell(f"interp-run {command}", **plain)
        assert (code, err) == (0, b"")
        assert out.isascii()
    code, _, err = shell("interp-run ablation --ckpt größe", **plain)
    assert code == 2
    assert b"UTF-8 locale" in err
    assert err.count(b"\n") == 1


COLOUR = re.compile(rb"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;)[0-9;]*m")


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


def test_progress_of_training_shows_where_it_is(tmp_path):
    settings = ("steps=40", "eval_samples=4", "log_every=1", "batch_size=4", "checkpoint_every=40")
    arguments = ["train", "matrix-completion", "--set", "model.d_model=8"]
    arguments += [part for one in settings for part in ("--set", f"train.{one}")]
    code, seen = on_a_terminal(arguments, 80, tmp_path, NO_COLOR="1")
    assert code == 0, seen.decode()
    assert not COLOUR.search(seen)
    plain = unstyled(seen)
    assert "Traceback" not in plain
    assert plain.rstrip().splitlines()[-1].startswith("runs/matrix-completion-cpu@last  step 40  ")
    bars = [part for part in re.split(r"[\r\n]+", plain) if "━" in part and "starting" not in part]
    assert bars
    assert all(re.search(r" \d+/40 .*mse_all 0\.\d+", line) for line in bars)
    assert max(map(len, bars)) <= 80


def test_windows_is_refused_in_one_line():
    windows = "import sys; sys.platform = 'win32'; "
    told = "interp_tasks needs Linux or macOS: on Windows, install it in WSL"

    def run(code):
        return subprocess.run([sys.executable, "-c", windows + code], capture_output=True, text=True)

    command = run("from interp_tasks.cli import main; sys.exit(main(['runs', 'zoo']))")
    assert (command.returncode, command.stdout, command.stderr) == (2, "", f"interp-run: {told}\n")
    for used in ("interp_tasks.train", "interp_tasks.experiments"):
        assert run(f"import interp_tasks; {used}").stderr.splitlines()[-1].endswith(f"UserError: {told}")
    # `circuits` and `tasks` run there.
    assert run("import circuits, interp_tasks; print('fine')").stdout == "fine\n"


def test_interrupted_before_the_command_line_is_there(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    loading = types.ModuleType("interp_tasks.cli.app")
    loading.__getattr__ = interrupt
    monkeypatch.setitem(sys.modules, "interp_tasks.cli.app", loading)
    assert main(["tasks"]) == 130
    assert capsys.readouterr() == ("", "interp-run: interrupted\n")


def test_a_head_counts_the_most_examples_of_its_split():
    rows = [
        {"ref": "r@1", "step": 1, "split": split, "n": n, "seed": 0}
        for split, n in (("grid", 113), ("grid", 12769), ("test", 99999))
    ]
    assert title(rows)[-1] == "12769 grid examples, seed 0"
