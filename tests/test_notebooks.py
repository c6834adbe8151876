"""The notebooks of docs are built from their sources: every cell runs, and shows what it is there to show."""

import ast
import importlib.util
import json
from base64 import b64encode
from pathlib import Path

import pytest

from circuits import plots

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NAMES = ["matrix-completion", "modular-addition"]


def builder():
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = builder()


def test_the_sources_are_those_of_this_test():
    assert [path.stem for path in build.SOURCES] == NAMES


@pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_its_source_and_what_its_cells_show(name, tmp_path):
    written = build.build(FOLDER / f"{name}.py", tmp_path, pictures=False)
    assert written == tmp_path / f"{name}.ipynb"
    held = json.loads(written.read_text(encoding="utf-8"))["cells"]
    source = [(cell["cell_type"], "".join(cell["source"])) for cell in held]
    assert source == build.cells(FOLDER / f"{name}.py")
    figures = []
    for cell in held:
        if cell["cell_type"] != "code":
            continue
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert kinds in ([], ["stream"], ["execute_result"], ["stream", "execute_result"])
        # A cell that ends in an expression is there to show it.
        ends = isinstance(ast.parse("".join(cell["source"])).body[-1], ast.Expr)
        assert bool(kinds) == ends, "".join(cell["source"])
        shown = [output["data"] for output in cell["outputs"] if output["output_type"] == "execute_result"]
        figures += [data[build.PLOTLY] for data in shown if build.PLOTLY in data]
    assert len(figures) >= 5
    assert all(figure["data"] and figure["layout"]["title"]["text"] for figure in figures)


def test_a_figure_is_shown_as_its_data_and_as_a_picture(monkeypatch):
    monkeypatch.setattr(plots, "picture", lambda figure, kind, **size: f"{kind} of {size['width']}".encode())
    figure = plots.heads([[1.0, 2.0]], title="Two heads")
    shown = build.bundle(figure, pictures=True)
    assert shown[build.PNG] == b64encode(b"png of 900").decode()
    assert shown["text/plain"] == "Figure: Two heads"
    assert shown[build.PLOTLY]["layout"]["title"]["text"] == "Two heads"
    assert build.PNG not in build.bundle(figure, pictures=False)
    assert build.bundle(2, pictures=True) == {"text/plain": "2"}


def test_a_cell_that_fails_fails():
    with pytest.raises(ZeroDivisionError):
        build.run("x = 1\nx / 0", {})
    assert build.run("print(2)\nx = 1", {}) == ("2\n", None)
    assert build.run("x = 1\nx + 1", {}) == ("", 2)
