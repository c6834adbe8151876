"""The notebooks of docs are built from their sources: every cell runs, and shows what it is there to show."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def builder():
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = builder()


@pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
@pytest.mark.parametrize("name", [path.stem for path in build.SOURCES])
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
