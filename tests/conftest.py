"""For every test: one thread, seeded hypothesis, and no third-party import while warnings are errors."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import Phase, settings

# Small tensors on shared cores: a second thread costs more than it brings, and one makes sums reproducible.
torch.set_num_threads(1)

settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=50)
# A longer search: pytest tests/circuits/test_properties.py --hypothesis-profile=campaign
settings.register_profile("campaign", deadline=None, database=None, max_examples=3000, print_blob=True)
# For tests/breakages.py, which asks whether a test fails and not for the smallest reason.
settings.register_profile("breakages", settings.get_profile("suite"), phases=[Phase.explicit, Phase.generate])
# What --hypothesis-profile names is loaded after this file.
settings.load_profile("suite")

with warnings.catch_warnings():
    # What it and its dependencies warn about while being imported is not ours; after it warnings are errors.
    warnings.simplefilter("ignore")
    import transformer_lens  # noqa: F401

#: Pages that train, or measure shipped models at length; other tests are marked where they stand.
SLOW = (
    "tests/test_docs.py::test_page_runs[docs/commands.md]",
    "tests/test_docs.py::test_page_runs[docs/matrix-completion/algorithms.md]",
    "tests/test_docs.py::test_page_runs[docs/matrix-completion/attention-heads.md]",
    "tests/test_docs.py::test_page_runs[docs/matrix-completion/training-dynamics.md]",
    "tests/test_docs.py::test_page_runs[docs/matrix-completion/transplant-and-permutation.md]",
    "tests/test_docs.py::test_page_runs[docs/report.md]",
    "tests/test_docs.py::test_page_runs[docs/shipped-models.md]",
    "tests/test_docs.py::test_page_runs[docs/tutorials/circuit-forms.md]",
    "tests/test_docs.py::test_page_runs[docs/tutorials/many-machines.md]",
    "tests/test_notebooks.py::test_a_notebook_holds_its_source_and_what_its_cells_show[matrix-completion]",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
