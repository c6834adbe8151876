"""Notebooks from their sources: `python docs/notebooks/build.py` runs every cell and writes NAME.ipynb beside NAME.py.

With `--no-pictures` figures are interactive only, which needs no browser. A source is a script with cells: `# %%` code,
`# %% [markdown]` text in comments. What the last line of a cell is worth is shown, as in Jupyter: figures as plotly's
own data and as a picture, tables as HTML.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCES = [path for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__)]
PLOTLY, PNG = "application/vnd.plotly.v1+json", "image/png"
MARK = re.compile(r"^# %%(?: \[(markdown)\])?\n", re.MULTILINE)


def cells(source: Path) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of every cell."""
    _, *parts = MARK.split(source.read_text(encoding="utf-8"))
    found = []
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        if kind:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.strip().splitlines())
        found.append((kind or "code", text.strip()))
    return found


def run(code: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line (None: it is no expression)."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue(), value


def bundle(value: Any, pictures: bool) -> dict[str, Any]:
    """A value in every form that it is shown in."""
    from circuits import plots

    if not hasattr(value, "to_plotly_json"):
        html = {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else {}
        return {**html, "text/plain": repr(value)}
    shown = {PLOTLY: json.loads(value.to_json()), "text/plain": f"Figure: {value.layout.title.text}"}
    if pictures:
        picture = plots.picture(value, "png", width=value.layout.width or 900, scale=1.5)
        shown[PNG] = b64encode(picture).decode()
    return shown


def build(source: Path, folder: Path = FOLDER, pictures: bool = True) -> Path:
    """Run a source and write its notebook; what a cell raises is raised.

    Args:
        pictures: put each figure into it as a picture as well, for viewers that run no scripts.
    """
    import nbformat
    from nbformat import v4

    names: dict[str, Any] = {"__name__": source.stem}
    made, count = [], 0
    for index, (kind, text) in enumerate(cells(source)):
        if kind == "markdown":
            made.append(v4.new_markdown_cell(text, id=f"cell-{index}"))
            continue
        count += 1
        printed, value = run(text, names)
        outputs = [v4.new_output("stream", name="stdout", text=printed)] if printed else []
        if value is not None:
            outputs.append(v4.new_output("execute_result", bundle(value, pictures), execution_count=count))
        made.append(v4.new_code_cell(text, outputs=outputs, execution_count=count, id=f"cell-{index}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = v4.new_notebook(cells=made, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(book)
    target = folder / f"{source.stem}.ipynb"
    target.write_text(nbformat.writes(book) + "\n", encoding="utf-8")
    return target


if __name__ == "__main__":
    given = argparse.ArgumentParser(description="Notebooks from their sources.")
    given.add_argument("sources", nargs="*", metavar="NAME.py", help="default: all")
    given.add_argument(
        "--no-pictures", action="store_true", help="interactive figures only; needs no browser"
    )
    chosen = given.parse_args()
    if not chosen.no_pictures:
        import kaleido

        # One browser for all pictures.
        kaleido.start_sync_server(silence_warnings=True)
    for path in [FOLDER / name for name in chosen.sources] or SOURCES:
        written = build(path, pictures=not chosen.no_pictures)
        print(f"{written.relative_to(FOLDER)}: {written.stat().st_size / 1e6:.2f} MB")
