"""Texts of others: what a terminal obeys is spelled out, what is long is cut, and the remedy of a refusal stays."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interp_tasks.text_formatting import LAYOUT, LONGEST, escape_control_characters, one_line, shorten_middle

CONTROLS = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")]
#: Of Unicode's property Bidi_Control.
BIDI = [chr(code) for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]


@pytest.mark.parametrize("keep", ["", LAYOUT])
def test_every_control_and_no_other_character_is_spelled_out(keep):
    for character in [*CONTROLS, *BIDI]:
        assert escape_control_characters(character, keep=keep) == (
            character if character in keep else repr(character)[1:-1]
        )
        assert repr(character)[1] == "\\"
    plain = "größe → 😀 ‍\u200d e\u0301 \u00a0|"
    assert escape_control_characters(plain) == plain


@given(st.text())
def test_json_comes_back_whole(text):
    written = json.dumps([text], ensure_ascii=False)
    shown = escape_control_characters(written, keep=LAYOUT, as_json=True)
    assert json.loads(shown) == [text]
    assert not set(shown) & {*CONTROLS, *BIDI} - {*LAYOUT}


@given(st.text(), st.integers(4, 100))
def test_both_ends_of_a_long_text_stay(text, most):
    shown = shorten_middle(text, most)
    assert len(shown) == min(len(text), most)
    head, cut, tail = shown.partition("...") if len(text) > most else (text, "", "")
    if "..." not in text:
        assert text.startswith(head)
        assert text.endswith(tail)
        assert bool(cut) == (len(text) > most)


@given(st.text(max_size=2000), st.sampled_from(["{0}", "{0!r}", "{1!r}"]))
def test_a_refusal_is_one_short_line_that_ends_with_its_remedy(text, form):
    remedy = "write whole numbers, such as 17,23"
    line = one_line(f"--option {form.format(text, [text])}: {remedy}")
    assert len(line) <= LONGEST
    assert line.startswith("--option")
    assert line.endswith(remedy)
    assert not set(line) & {*CONTROLS, *BIDI}
