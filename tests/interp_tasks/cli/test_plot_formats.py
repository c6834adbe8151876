"""``--plot-format``: every figure of a command as a picture, with its title in it."""

import struct
import zlib

import pytest

from interp_tasks.cli import main
from interp_tasks.pages.pictures import marked

MC = "zoo:matrix-completion-4x4"
COMMAND = ["attention", "--ckpt", f"{MC}@pre", "--ckpt", f"{MC}@post", "--samples", "4", "--quiet"]


@pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
def test_every_figure_is_a_picture_with_its_title(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("circuits.figures.export.check_exporter", lambda: None)
    monkeypatch.setattr(
        "circuits.plots.picture", lambda figure, kind: f"{kind} {figure.layout.title.text}".encode()
    )
    assert main([*COMMAND, "--plot-format", "svg", "--out", str(tmp_path)]) == 0
    mark = "<!-- interp-tasks -->\n"
    assert (tmp_path / "attention.svg").read_text() == f"svg Mean attention, {MC}@pre{mark}"
    assert (tmp_path / "attention-2.svg").read_text() == f"svg Mean attention, {MC}@post{mark}"
    # Beside the files of the table, and in place of the page.
    assert (tmp_path / "attention.csv").exists()
    assert not (tmp_path / "attention.html").exists()


@pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
def test_pictures_of_an_earlier_call_go_and_no_other_file(tmp_path, monkeypatch, capsys):
    header = b"\x89PNG\r\n\x1a\n" + bytes(25)
    monkeypatch.setattr("circuits.figures.export.check_exporter", lambda: None)
    monkeypatch.setattr("circuits.plots.picture", lambda figure, kind: header if kind == "png" else b"<svg/>")
    (tmp_path / "attention-3.svg").write_text("a reader's own")
    (tmp_path / "attention-4.svg").write_text("<svg/><!-- interp-tasks -->")
    (tmp_path / "attention-of-mine.svg").write_text("<svg/><!-- interp-tasks -->")
    kept = {"attention-3.svg", "attention-of-mine.svg"}

    def pictures():
        return {path.name for path in tmp_path.iterdir() if path.suffix in (".svg", ".png")} - kept

    to = ["--out", str(tmp_path)]
    assert main([*COMMAND, "--plot-format", "svg", *to]) == 0
    assert pictures() == {"attention.svg", "attention-2.svg"}
    assert main([*COMMAND[:3], *COMMAND[5:], "--plot-format", "png", *to]) == 0
    assert pictures() == {"attention.png"}
    assert main([*COMMAND, *to]) == 0
    assert pictures() == set()
    assert all((tmp_path / name).exists() for name in kept)


def test_a_marked_picture_is_a_picture():
    """Chunks of a PNG: length, kind, content and its checksum."""
    plain = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(17) + b"rest"
    found = marked(plain, "png")
    length, kind = struct.unpack(">I4s", found[33:41])
    assert kind == b"tEXt"
    assert found[41 : 41 + length] == b"Software\x00interp-tasks"
    assert struct.unpack(">I", found[41 + length : 45 + length]) == (zlib.crc32(found[37 : 41 + length]),)
    assert found[:33] + found[45 + length :] == plain


def test_another_format_is_refused_before_anything_is_loaded(capsys):
    assert main([*COMMAND, "--plot-format", "gif"]) == 2
    assert capsys.readouterr().err.strip().endswith("choose html, png or svg")


def test_without_an_exporter_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.2.1")
    assert main([*COMMAND, "--plot-format", "png"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "pip install 'kaleido>=1'" in said.err
    assert not said.out
    assert not list(tmp_path.iterdir())
