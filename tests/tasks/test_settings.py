"""Architecture settings."""

from __future__ import annotations

from tasks.matrix_completion import MatrixModelSettings
from tasks.modular_arithmetic.remainders import MiiiiModelSettings
from tasks.modular_arithmetic.table import ArithmeticModelSettings


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
