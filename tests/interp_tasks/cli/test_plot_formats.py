"""``--plot-format``: every figure of a command as a picture, with its title in it."""

import pytest

from interp_tasks.cli import main

MC = "zoo:matrix-completion-4x4"
COMMAND = ["attention", "--ckpt", f"{MC}@pre", "--ckpt", f"{MC}@post", "--samples", "4", "--quiet"]


@pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
def test_every_figure_is_a_picture_with_its_title(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("circuits.figures.export.check_exporter", lambda: None)
    monkeypatch.setattr(
        "circuits.plots.picture", lambda figure, kind: f"{kind} {figure.layout.title.text}".encode()
    )
    assert main([*COMMAND, "--plot-format", "svg", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "attention.svg").read_text() == f"svg Mean attention, {MC}@pre"
    assert (tmp_path / "attention-2.svg").read_text() == f"svg Mean attention, {MC}@post"
    # Beside the files of the table, and in place of the page.
    assert (tmp_path / "attention.csv").exists()
    assert not (tmp_path / "attention.html").exists()


def test_without_an_exporter_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.2.1")
    assert main([*COMMAND, "--plot-format", "png"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "pip install 'kaleido>=1'" in said.err
    assert not said.out
    assert not list(tmp_path.iterdir())
