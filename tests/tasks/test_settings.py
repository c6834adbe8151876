"""Architecture settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tasks import ModelSettings
from tasks.matrix_completion import MatrixModelSettings
from tasks.modular_arithmetic.remainders import MiiiiModelSettings
from tasks.modular_arithmetic.table import ArithmeticModelSettings
from tasks.settings import one_line


def test_heads_must_divide_the_width_unless_their_width_is_given() -> None:
    with pytest.raises(ValidationError) as refused:
        ModelSettings(d_model=10, n_heads=3)
    assert one_line(refused.value, "model", ModelSettings.model_fields) == (
        "model: d_model = 10 does not divide into 3 heads; set d_head or change one"
    )
    assert ModelSettings(d_model=10, n_heads=3, d_head=7).d_head == 7


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValidationError) as refused:
        ModelSettings.model_validate({"d_modle": 10})
    line = one_line(refused.value, "model", ModelSettings.model_fields)
    assert line.startswith("no setting model.d_modle: did you mean model.d_model? model has n_layers, ")
    assert all(name in line for name in ModelSettings.model_fields)


def test_defaults_are_the_published_models() -> None:
    """Fact sheets: matrix completion 1.3, modular arithmetic 1.1 and 1.2."""
    matrix = MatrixModelSettings()
    assert (matrix.n_layers, matrix.n_heads, matrix.d_model) == (4, 8, 768)
    assert (matrix.act_fn, matrix.attention, matrix.biases) == ("gelu", "bidirectional", "trained")
    assert (matrix.init, matrix.init_std, matrix.mask_embedding) == ("normal", 0.02, "zero")
    nanda = ArithmeticModelSettings()
    assert (nanda.n_layers, nanda.n_heads, nanda.d_model) == (1, 4, 128)
    assert (nanda.act_fn, nanda.normalization, nanda.biases, nanda.init) == ("relu", None, "frozen", "nanda")
    miiii = MiiiiModelSettings()
    assert (miiii.n_layers, miiii.n_heads, miiii.d_model) == (1, 4, 256)
    assert (miiii.act_fn, miiii.normalization, miiii.biases, miiii.init) == ("relu", None, "frozen", "he")
    assert miiii.attention == "bidirectional"
