"""The table of sites in docs/circuits/sites.md is what is measured here, for the classes that are installed.

A column is a model class of a version of transformer-lens. A cell says where a write takes effect: "in line" if a
plain hook at the hook point does what the forward by hand does with the same write; else our own write does, and the
cell names where it enters.
"""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from circuits import Site, edit, run
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS

PAGE = Path(__file__).parents[3] / "docs" / "circuits" / "sites.md"
BEGIN, END = "<!-- sites:begin -->", "<!-- sites:end -->"
HEAD = ["site", "hook", "shape", "HookedTransformer 3.9", "native bridge 3.9", "native bridge 4.3"]
TITLES = {"HookedTransformer": "HookedTransformer", "TransformerBridge": "native bridge"}


def moved(x):
    return x + 0.5 * torch.arange(x.numel(), dtype=x.dtype).sin().reshape(x.shape)


def written_plainly(model, tokens, hook):
    """The output with a write by TransformerLens's own hook, heads split as it splits them."""
    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=[(hook, lambda x, hook: moved(x))])


def cell(model, tokens, by_hand, assert_same, name):
    layer = 0 if KINDS[name].per_layer else None
    clean = by_hand(model, tokens)
    expected = by_hand(model, tokens, lambda s, at, x: moved(x) if (s, at) == (name, layer) else x)
    assert_same(run(model, tokens, edit(Site(name, layer), moved)), expected, clean)
    if same(written_plainly(model, tokens, Site(name, layer).hook()), expected):
        return "in line"
    return "through " + enters(model, tokens, name)


def enters(model, tokens, name):
    """The first of these places whose value, seen by a plain hook there, our write at `name` changes."""
    surface, seen = HookedModel.of(model), {}
    before = {}
    for place in ("pattern", "z", "resid_post"):
        hook = surface.hooks[Site(place, 0).hook()]
        for found in (before, seen):

            def look(module, inputs, output, place=place, found=found):
                found.setdefault(place, output)

            handle = hook.register_forward_hook(look)
            run(model, tokens, *([edit(Site(name, 0), moved)] if found is seen else []))
            handle.remove()
        if not same(before[place], seen[place]) and plainly_writable(model, tokens, place):
            return f"`{place}`"
    raise AssertionError(f"a write at {name} enters nowhere")


def plainly_writable(model, tokens, place):
    with torch.no_grad():
        return not same(written_plainly(model, tokens, Site(place, 0).hook()), model(tokens))


def same(one, other):
    return bool((one - other).abs().max() < 1e-9)


def table_on_the_page():
    text = PAGE.read_text()
    rows = re.findall(r"^\|(.*)\|$", text[text.index(BEGIN) : text.index(END)], re.MULTILINE)
    return [[one.strip() for one in row.split("|")] for row in rows]


def rendered(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(HEAD), *lines[1:]])


@pytest.mark.filterwarnings("ignore:A hook on .* returned a modified tensor")
def test_the_page_shows_what_is_measured(make_model, family, tokens, by_hand, assert_same):
    column = f"{TITLES[family]} {'.'.join(version('transformer-lens').split('.')[:2])}"
    if column not in HEAD:
        pytest.skip(f"{column} is not a column of {PAGE.name}; HEAD here lists them")
    there = table_on_the_page()
    known = {row[0]: dict(zip(there[0], row, strict=True)) for row in there[2:]}
    model = make_model(family=family)
    rows = [HEAD]
    for name, kind in KINDS.items():
        given = known.get(name, {})
        row = [name, f"`{kind.hook.format('L')}`", f"[{' '.join(kind.axes)}]"]
        for title in HEAD[3:]:
            measured = title == column
            row.append(cell(model, tokens, by_hand, assert_same, name) if measured else given.get(title, "?"))
        rows.append(row)
    wanted = rendered(rows)
    found = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert found == wanted, f"between the marks of {PAGE} there should be\n\n{wanted}\n"
