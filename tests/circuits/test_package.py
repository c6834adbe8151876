import inspect
import subprocess
import sys

import pytest

import circuits


def test_every_public_name_is_there():
    assert sorted(circuits.__all__) == circuits.__all__
    for name in circuits.__all__:
        assert getattr(circuits, name) is not None


def test_importing_it_loads_neither_transformer_lens_nor_plotly():
    code = "import sys, circuits; print({'transformer_lens', 'plotly', 'tasks'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_names_of_sites_and_heads_are_read_without_torch():
    code = (
        "import sys\n"
        "from circuits import CircuitsError, Site\n"
        "from circuits.model.heads import parse_heads\n"
        "parse_heads('0.1-3+L1H2'), Site.parse('z.1')\n"
        "print({'torch', 'numpy', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_name_it_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'ablation'"):
        circuits.ablation  # noqa: B018


def modules():
    return [circuits, *(one for name in circuits.__all__ if inspect.ismodule(one := getattr(circuits, name)))]


def test_dir_lists_what_is_public_and_nothing_else():
    for module in modules():
        assert dir(module) == sorted(module.__all__), module.__name__


def functions():
    """Yields the public functions, and the methods of public classes, by name."""
    found = {name: getattr(module, name) for module in modules() for name in module.__all__}
    for path, value in found.items():
        if inspect.isfunction(value):
            yield path, value
        for name, member in inspect.getmembers(value) if inspect.isclass(value) else ():
            member = getattr(member, "fget", member)
            own = str(getattr(member, "__module__", "")).startswith("circuits") and not name.startswith("_")
            if (inspect.isfunction(member) or inspect.ismethod(member)) and (own or name == "__init__"):
                yield f"{path}.{name}", member


#: The edit of a circuit, whose module circuits know; and arguments that go to the function given.
UNTYPED = {"CircuitEdit.__init__.circuit", "each.arguments", "grid.arguments"}


def test_public_parameters_and_results_have_types():
    found = dict(functions())
    untyped = set()
    for path, function in found.items():
        signature = inspect.signature(function)
        types = {name: one.annotation for name, one in signature.parameters.items() if name != "self"}
        types["return"] = None if path.endswith("__init__") else signature.return_annotation
        bad = [name for name, one in types.items() if one is inspect._empty or "Any" in str(one).split(" | ")]
        untyped |= {f"{path}.{name}" for name in bad}
    assert len(found) > 150
    assert untyped == UNTYPED
