"""The pages of `circuits` on TransformerLens 4, where the example model is a bridge.

On 3.9 tests/test_docs.py runs them.
"""

import pytest

from tests.circuits import conftest
from tests.pages import CIRCUITS, EXAMPLE_MODEL, files, folder, run_page

__all__ = ["folder"]

# They build a HookedTransformer, name its weights or load one that ships; `large-sweeps` needs Dask.
OF_HOOKED_TRANSFORMER = {
    "fourier",
    "frequencies",
    "index",
    "large-sweeps",
    "own-module",
    "probe",
    "transplant",
    "traps",
}
PAGES = sorted(page.stem for page in CIRCUITS.glob("*.md"))


@pytest.mark.skipif(conftest.HOOKED in conftest.FAMILIES, reason="tests/test_docs.py runs them")
@pytest.mark.parametrize("page", [*sorted(set(PAGES) - OF_HOOKED_TRANSFORMER), "../tutorials/hugging-face"])
def test_page_runs_on_transformer_lens_4(page, folder):
    for name, text in files(EXAMPLE_MODEL).items():
        (folder / name).write_text(text, encoding="utf-8")
    run_page((CIRCUITS / f"{page}.md").resolve(), folder, strict=True)


def test_pages_that_need_a_hooked_transformer_are_there():
    assert set(PAGES) >= OF_HOOKED_TRANSFORMER
