"""The notebooks of docs are their sources, run: cells, kinds of outputs and figures agree; nothing in them failed."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NAMES = ["matrix-completion", "modular-addition"]


def builder():
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = builder()


def notebook(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def text(cell):
    return "".join(cell["source"])


def test_every_source_has_its_notebook():
    assert [path.stem for path in build.SOURCES] == NAMES
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_its_source_and_its_figures(name):
    held = notebook(name)["cells"]
    assert [(cell["cell_type"], text(cell)) for cell in held] == build.cells(FOLDER / f"{name}.py")
    outputs = [output for cell in held if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    figures = [output["data"] for output in outputs if build.PLOTLY in output.get("data", {})]
    assert len(figures) >= 5
    for figure in figures:
        assert "".join(figure[build.PNG]).startswith("iVBORw0KGgo"), "a PNG, in base64"
        assert figure[build.PLOTLY]["layout"]["title"]["text"]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 2e6


@pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_again_to_the_same_shape(name):
    names = {"__name__": name}
    for cell in notebook(name)["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed, value = build.run(text(cell), names)
        streams = ["".join(one["text"]) for one in cell["outputs"] if one["output_type"] == "stream"]
        shown = [one["data"] for one in cell["outputs"] if one["output_type"] == "execute_result"]
        assert bool(printed) == bool(streams)
        assert (value is None) == (not shown)
        if not shown:
            continue
        assert sorted(shown[0]) == sorted(build.mimes(value))
        if build.PLOTLY in shown[0]:
            held, made = shown[0][build.PLOTLY], json.loads(value.to_json())
            assert [one["type"] for one in held["data"]] == [one["type"] for one in made["data"]]
            assert held["layout"]["title"] == made["layout"]["title"]


def test_a_cell_that_fails_fails():
    with pytest.raises(ZeroDivisionError):
        build.run("x = 1\nx / 0", {})
    assert build.run("print(2)\nx = 1", {}) == ("2\n", None)
    assert build.run("x = 1\nx + 1", {}) == ("", 2)
