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

#: Pages that train, or measure shipped models at length, and the longest proofs: by how their names begin.
SLOW = (
    "tests/circuits/engine/test_memory.py::test_a_bound_is_kept_to",
    "tests/circuits/engine/test_memory.py::test_half_as_much_again_as_a_loop",
    "tests/circuits/engine/test_memory.py::test_what_is_told_is_what_is_taken",
    "tests/circuits/engine/test_replay.py::test_any_combination",
    "tests/circuits/engine/test_replay.py::test_half_precision",
    "tests/circuits/engine/test_resume.py::test_floating_point_operations",
    "tests/circuits/fourier/test_fourier.py::test_noise_",
    "tests/circuits/model/test_prompts.py::test_sweep",
    "tests/interp_tasks/cli/test_cli.py::test_a_ref_is_resolved_once[modular progress",
    "tests/interp_tasks/cli/test_cli.py::test_beside_transformer_lens_4_a_checkpoint_is_refused_in_one_line",
    "tests/interp_tasks/cli/test_cli.py::test_progress_is_drawn_on_a_terminal",
    "tests/interp_tasks/cli/test_every_command.py::test_json_is_what_the_schema_says",
    "tests/interp_tasks/cli/test_from_function.py::test_an_experiment_is_a_file_and_a_line",
    "tests/interp_tasks/cli/test_faults.py::test_a_terminal_of_80_columns",
    "tests/interp_tasks/cli/test_faults.py::test_progress_of_training_shows_where_it_is",
    "tests/interp_tasks/grids/test_done.py::test_dask_gives_the_table_of_one_process",
    "tests/interp_tasks/grids/test_grid.py::test_dask_gives_the_table_of_one_process",
    "tests/interp_tasks/grids/test_grid.py::test_processes_give_the_table_of_one_process",
    "tests/test_breakages.py::test_a_child_that_hangs_is_killed",
    "tests/test_breakages.py::test_what_is_not_noticed_or_not_for_its_reason_is_a_failure",
    *(
        f"tests/test_docs.py::test_page_runs[docs/{page}.md]"
        for page in (
            "circuits/large-sweeps",
            "commands",
            "matrix-completion/algorithms",
            "matrix-completion/attention-heads",
            "matrix-completion/copying",
            "matrix-completion/embeddings",
            "matrix-completion/order",
            "matrix-completion/out-of-distribution",
            "matrix-completion/training-dynamics",
            "matrix-completion/transplant-and-permutation",
            "modular-arithmetic/embeddings",
            "modular-arithmetic/neurons",
            "modular-arithmetic/progress-measures",
            "report",
            "shipped-models",
            "tutorials/circuit",
            "tutorials/circuit-forms",
            "tutorials/many-machines",
            "tutorials/modular-addition",
        )
    ),
    "tests/test_notebooks.py::test_a_notebook_holds_its_source_and_what_its_cells_show",
)
#: A product of features with kinds of bridges is run where bridges are all there is, beside transformer-lens 4; beside
#: 3.9 these files are: what a bridge is, and every place of every kind of model against a forward by hand.
BRIDGES_HERE = tuple(
    f"tests/circuits/model/test_{name}.py" for name in ("bridge", "families", "site_table", "surface")
)


def is_of_a_bridge(item: pytest.Item) -> bool:
    of_what = item.name.partition("[")[2].lower()
    is_parametrized = bool(of_what) and item.nodeid.startswith("tests/circuits/")
    return is_parametrized and ("bridge" in of_what or "hf_model" in getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if is_of_a_bridge(item) and not item.nodeid.startswith(BRIDGES_HERE):
            item.add_marker(pytest.mark.bridges)
    # The slow ones first, so that of several workers none ends with a long one while the others have nothing to do.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
