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
    assert set(circuits.__all__) <= set(dir(circuits))
