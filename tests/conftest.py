"""For every test: one thread, seeded hypothesis, and no third-party import while warnings are errors."""

from __future__ import annotations

import gc
import os
import signal
import warnings

import pytest
from hypothesis import Phase, settings

# Small tensors on shared cores: a second thread costs more than it brings, and one makes sums reproducible. Of the
# processes that tests start too: threads that wait for each other keep a core busy that another worker is using.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What imports and collection make is there to stay, so looking through it for what can be freed is for nothing.
gc.disable()
# A shell that runs the tests in the background has them ignore Ctrl-C, and all processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=50)
# A longer search: pytest tests/circuits/test_properties.py --hypothesis-profile=campaign
settings.register_profile("campaign", deadline=None, database=None, max_examples=3000, print_blob=True)
# For mutmut, which asks whether a test fails and not for the smallest reason.
settings.register_profile("mutants", settings.get_profile("suite"), phases=[Phase.explicit, Phase.generate])
# What --hypothesis-profile names is loaded after this file.
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Import what nearly every test needs: now, as later warnings are errors.

    But not in the process that only hands tests to pytest-xdist's workers, which would wait for it.
    """
    parser.addoption("--keep", action="store_true", help="tests of circuits keep what they find")
    given = pluginmanager.get_plugin("pytestconfig").known_args_namespace
    if getattr(given, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformer_lens  # noqa: F401
    torch.set_num_threads(1)


#: Pages that train, or measure shipped models at length, and the longest proofs: by file, how their names begin.
SLOW = {
    "circuits/circuit/test_evaluation": ("curves_and_their_areas",),
    "circuits/patch/test_edges": ("edges_are_derivatives_along_paths_by_hand[bi",),
    "circuits/test_properties": ("nothing_is_left_behind",),
    "circuits/test_surroundings": ("numbers_are_those_by_hand_in_a_wider_draw",),
    "interp_tasks/cli/test_every_command": ("json_is_what_the_schema_says",),
    "interp_tasks/cli/test_system": ("a_full_disk_keeps_the_old_files_and_the_table",),
    "interp_tasks/experiments/test_circuit": ("faithfulness_is_that_of_a_forward_by_hand",),
    "interp_tasks/measurement/test_head_classes": ("the_least_patterned_heads",),
    "interp_tasks/test_report": ("a_run_without_a_drop",),
    "interp_tasks/search/test_search": ("an_interrupted_search",),
    "interp_tasks/test_zoo": (
        "a_recipe_is_trained_packed_and_listed",
        "the_final_level_of_an_even_number_of_seeds",
        "the_log_ends_with_the_metrics",
    ),
    "test_docs": (
        "page_runs[README.md]",
        *(
            f"page_runs[docs/{page}.md]"
            for page in (
                "api/experiments",
                "api/interventions",
                "api/measurements",
                "checkpoints",
                "circuits/circuit",
                "circuits/edges",
                "circuits/fourier",
                "circuits/frequencies",
                "commands",
                "grids",
                "matrix-completion",
                "modular-arithmetic",
                "plots",
                "report",
                "results/beyond-the-papers",
                "results/miiii",
                "results/modular-arithmetic",
                "results/tests-that-cannot-fail",
                "search",
                "tutorials/circuit",
                "tutorials/circuit-forms",
                "tutorials/hugging-face",
                "tutorials/induction",
                "tutorials/modular-addition",
                "your-own-model",
            )
        ),
    ),
    "test_notebooks": ("a_notebook_holds_its_source_and_what_its_cells_show",),
}
#: What is run before a release: kills and damage by the hundred, shipped weights measured again for minutes, the same
#: proof on a further kind of model.
RELEASE = {
    "circuits/fourier/test_fourier": ("noise_",),
    "circuits/patch/test_edges": (
        *(
            f"edges_of_means_and_zeros_are_slopes_and_effects_of_stored_ones[{kind}"
            for kind in ("bi", "post")
        ),
    ),
    "interp_tasks/checkpoints/test_run_writer_killed": ("killed_at_every_disk_operation",),
    "interp_tasks/cli/test_every_command": tuple(
        # What takes more than a second, and is run for its JSON too.
        f"tables_fit_80_columns_and_have_no_colour_in_a_pipe[{command}"
        for command in (
            "circuit",
            "command",
            "demo",
            "fourier --ckpt zoo:modular",
            "grid few.toml --executor",
            "matrix algorithm",
            "matrix order",
            "modular neurons",
            "modular primes",
            "modular progress",
            "modular weights",
            "runs curve",
            "runs report",
            "runs zoo",
        )
    ),
    "interp_tasks/cli/test_system": ("a_terminal_of_80_columns",),
    "interp_tasks/grids/test_grid": (
        "a_unit_whose_process_dies",
        "executors_give_the_table_of_one_process[dask",
        "executors_give_the_table_of_one_process[processes",
    ),
    "test_docs": ("page_runs[docs/circuits/large-sweeps.md]",),
    "interp_tasks/test_campaigns": ("no_trial_of_a_campaign_fails",),
    "test_results": tuple(
        f"the_records_are_of_the_shipped_runs[{study}" for study in ("nanda-progress", "miiii-mechanism")
    ),
}
#: By marker, how the ids of its tests begin.
NAMED = {
    marker: tuple(f"tests/{file}.py::test_{name}" for file, names in files.items() for name in names)
    for marker, files in (("rare", RELEASE), ("slow", SLOW))
}
#: Kinds of models that a feature is tried on before a release: beside each stands a commoner kind that is much like it.
RARE_KINDS = (
    "alibi'",
    "attention only",
    "attention-only",
    "capped",
    "every hook on'",
    "gated",
    "local",
    "olmoe",
    "one key head",
    "parallel'",
    "rotary by parts",
    "sliding window-left",
    "solu",
    "-right]",
    # Hugging Face's: beside GPT-2, Llama, Gemma 2 and BERT.
    "bloom",
    "falcon",
    "gptj",
    "granite",
    "mistral",
    "mixtral",
    "neox",
    "opt-",
    "opt]",
    "phi",
    "pythia",
    "qwen",
)
#: Files that try every kind of model, and bridges, in CI: each place that can be edited, against a forward by hand.
EVERY_KIND = tuple(
    f"tests/circuits/{name}.py"
    for name in (
        "test_matrix",
        "model/test_bridge",
        "model/test_families",
        "model/test_hooked_model",
        "model/test_bridge_huggingface",
        "interventions/test_huggingface_paths",
        "circuit/test_huggingface",
    )
)
#: Of these, what bridges are tried on beside transformer-lens 3.9 too, and not only where bridges are all there is.
BRIDGES_HERE = EVERY_KIND[1:3]


def is_of_a_rare_kind(item: pytest.Item) -> bool:
    of_what = item.name.partition("[")[2]
    return item.nodeid.startswith("tests/circuits/") and any(kind in of_what for kind in RARE_KINDS)


def is_of_a_bridge(item: pytest.Item) -> bool:
    of_what = item.name.partition("[")[2].lower()
    is_parametrized = bool(of_what) and item.nodeid.startswith("tests/circuits/")
    return is_parametrized and ("bridge" in of_what or "hf_model" in getattr(item, "fixturenames", ()))


def tier(item: pytest.Item, bridges_alone: bool) -> str | None:
    """Returns the marker of a test: a feature on rare kinds of models or on bridges is for a release."""
    for marker, prefixes in NAMED.items():
        if item.nodeid.startswith(prefixes):
            return marker
    here, rare = item.nodeid.startswith(BRIDGES_HERE), is_of_a_rare_kind(item)
    if is_of_a_bridge(item) and not here:
        return "bridges" if item.nodeid.startswith(EVERY_KIND) and not rare else "rare"
    if rare and not (here and bridges_alone):
        return "slow" if item.nodeid.startswith(EVERY_KIND) else "rare"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import transformer_lens

    bridges_alone = "HookedTransformer" not in vars(transformer_lens)  # 4.3 raises ImportError for it
    for item in items:
        if marker := tier(item, bridges_alone):
            item.add_marker(marker)
            item.add_marker("slow")  # so that "not slow" is what is run daily
    # The slow ones first, so that of several workers none ends with a long one while the others have nothing to do.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
