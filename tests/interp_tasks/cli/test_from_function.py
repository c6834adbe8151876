"""Commands made from functions: every option reaches its parameter, a new experiment is one file and one line."""

import importlib
import inspect
import subprocess
import sys
from typing import Annotated

import pytest
import typer

from interp_tasks import experiments
from interp_tasks.checkpoints import refs
from interp_tasks.cli import commands, main
from interp_tasks.cli.app import own_command, program
from interp_tasks.cli.from_function import command_of
from interp_tasks.cli.groups import every_command, first_paragraph
from interp_tasks.measurement.argument_types import bare
from interp_tasks.measurement.experiment import EXPERIMENTS, Experiment
from interp_tasks.measurement.heads import edits as head_edits
from interp_tasks.published import papers

CKPT = "zoo:matrix-completion-4x4@post"
NEW = '''"""Counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.runner import Measured, measure


@experiment("Look")
def counting(
    refs: str | Sequence[str],
    times: Annotated[str | Sequence[str], typer.Option("--times", help="How often."), list[str]] = (),
    **options,
):
    """Count the weights of a model.

    Args:
        refs: REFs.
    """

    def measure_checkpoint(subject):
        import pandas

        count = sum(each.numel() for each in subject.model.parameters())
        row = {"variant": ",".join(times), "metric": "weights", "value": count, "n": 1}
        return Measured(pandas.DataFrame([row]), {})

    return measure("counting", refs, options, measure_checkpoint, config={})
'''


def test_an_experiment_is_a_file_and_a_line(tmp_path):
    """In a copy of the application: its command is there, in its panel, with its options, and measures."""
    copy = tmp_path / "interp_tasks"
    source = importlib.import_module("interp_tasks").__path__[0]
    copied = ["cp", "-r", source, str(copy)]
    subprocess.run(copied, check=True)
    (copy / "experiments" / "_counting.py").write_text(NEW)
    with open(copy / "experiments" / "__init__.py", "a") as file:
        file.write("from interp_tasks.experiments._counting import counting\n")
    call = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from interp_tasks.cli import main; "
        "from interp_tasks.experiments import counting; assert callable(counting); "
        "assert not main(['--help']); "
        f"assert not main('counting --ckpt {CKPT} --times a --times b --samples 2'.split())"
    )
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Count the weights of a model." in done.stdout
    assert "a,b" in done.stdout


def test_help_lists_the_experiments_that_there_are():
    """``--help`` imports none of them: what it says of each is written down, and is what they say."""
    said = {}
    for name, each in EXPERIMENTS.items():
        said.setdefault(each.place, {})[name] = first_paragraph(each.function)
    assert said == commands.EXPERIMENTS, "cli/commands/__init__.py lists other lines"
    assert list(commands.PAPERS) == papers()
    call = (
        "import sys; from interp_tasks.cli import main; assert not main(['--help']); "
        "assert 'interp_tasks.experiments' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", call], capture_output=True, check=True)


def test_every_experiment_is_a_public_function():
    for name, each in EXPERIMENTS.items():
        held = getattr(experiments, name.replace("-", "_"))
        assert inspect.isfunction(held)
        assert held is each.function
        assert name.replace("-", "_") in experiments.__all__


def test_every_option_of_a_function_is_one_of_its_command():
    made = {path[-1]: command for path, command in every_command(program())}
    for name, each in EXPERIMENTS.items():
        if own_command(each) is not None:
            continue
        options = {option.name for option in made[name].params}
        own = {
            parameter.name
            for parameter in inspect.signature(each.function).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        assert own - {"refs", "runs", "progress"} <= options


def given(
    refs,
    few: Annotated[tuple[int, ...], typer.Option("--few"), str, lambda text: (text,)] = (1, 2),
    **options,
):
    """Keep what is given."""


def unsaid(refs, times: int = 1):
    """Take something that is no option."""


def test_defaults_are_written_as_the_command_line_has_them():
    made = command_of(Experiment("given", given, "Look"))
    assert made(ckpt=["x"]).few == "1,2"
    with pytest.raises(TypeError, match=r"unsaid: times has no typer\.Option"):
        command_of(Experiment("unsaid", unsaid, "Look"))


def test_the_type_of_an_option_is_what_python_callers_are_told():
    assert bare("Annotated[str | Sequence[int] | None, KEYS, str | None]") == "str | Sequence[int] | None"
    assert bare("str | None") == "str | None"
    with pytest.raises(Exception, match=r"ablation: mode is of type str, not 3"):
        experiments.ablation("x", mode=3)


def test_a_ref_is_resolved_once_and_a_spec_read_once(monkeypatch, capsys):
    """From the words of the command line to the table."""
    resolved, read = [], []
    names = [
        module for module in list(sys.modules.values()) if getattr(module, "resolve", None) is refs.resolve
    ]

    def resolve(ref, real=refs.resolve):
        resolved.append(str(ref))
        return real(ref)

    for module in names:
        monkeypatch.setattr(module, "resolve", resolve)

    def read_specs(heads, real=head_edits.read_specs):
        read.append(heads)
        return real(heads)

    ablation = importlib.import_module("interp_tasks.experiments._ablation")
    monkeypatch.setattr(sys.modules[ablation.__name__], "read_specs", read_specs)
    again = []
    grammar = importlib.import_module("circuits.model.heads")

    def part(text, whole, real=grammar._parse_part):
        again.append(text)
        return real(text, whole)

    monkeypatch.setattr(grammar, "_parse_part", part)
    assert main(["ablation", "--ckpt", CKPT, "--heads", "0.1", "--samples", "4", "--quiet"]) == 0
    assert "0.1" in capsys.readouterr().out
    assert resolved == [CKPT]
    assert (read, again) == ([["0.1"]], [])
