"""Reads prompts and their answers from a file: what a run is on, where patches come from, the metric, and labels."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from circuits.arguments import is_whole
from circuits.errors import CircuitsError, format_value
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import continuation_ids, prompts
from circuits.model.prompts_with_mask import Prompts, row_numbers
from circuits.sweeps.logit_difference import LogitDifference, logit_difference

CALLER = "read_prompts"
#: The columns that every row has; `corrupted` may be missing from all, and all others are labels.
NEEDED, CORRUPTED = ("clean", "answer", "wrong"), "corrupted"
TEXTS = (*NEEDED, CORRUPTED)


@dataclass(frozen=True)
class PromptPairs:
    """Prompts with their answers, and a corrupted partner for each: what `read_prompts` reads.

    Attributes:
        tokens: the clean prompts, which verbs take as they are.
        metric: the logit of each prompt's answer minus that of its wrong answer, at its last token.
        labels: further columns of the file, by name, one value for each prompt.
        corrupted: the partners, row by row; None for a file without them. `source` is the same, or an error.
    """

    tokens: Prompts
    metric: LogitDifference
    labels: Mapping[str, tuple[Any, ...]]
    corrupted: Prompts | None

    @property
    def source(self) -> Prompts:
        """The corrupted prompts, of which each has as many tokens as its clean one: what patches come from."""
        if self.corrupted is None:
            raise CircuitsError(f"{CALLER}: the file has no column corrupted, where patches come from")
        own, other = self.tokens.lengths, self.corrupted.lengths
        for row in (own != other).nonzero()[:, 0].tolist():
            raise CircuitsError(
                f"{CALLER}: row {row + 1}: clean has {int(own[row])} tokens and corrupted {int(other[row])}; patches "
                "take each position from the same one, so give pairs of one length"
            )
        return self.corrupted

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: int | slice | Sequence[int] | np.ndarray | Tensor) -> PromptPairs:
        """Returns the pairs of a slice, of rows by their numbers from 0, or of a mask."""
        chosen = row_numbers(rows, len(self))
        right, wrong = (tuple(side[row] for row in chosen) for side in (self.metric.right, self.metric.wrong))
        return PromptPairs(
            self.tokens[chosen],
            LogitDifference(right, wrong, self.metric.positions),
            {name: tuple(values[row] for row in chosen) for name, values in self.labels.items()},
            None if self.corrupted is None else self.corrupted[chosen],
        )

    def __repr__(self) -> str:
        labels = f", labels {', '.join(self.labels)}" if self.labels else ""
        return f"PromptPairs({self.tokens!r}, {self.metric!r}{labels})"


def read_prompts(model: nn.Module, file: str | Path, side: str | None = None) -> PromptPairs:
    """Reads prompts and answers from a file, in the tokens of a model.

        pairs = read_prompts(model, "prompts.csv")
        sweep(model, pairs.tokens, variants, pairs.metric)
        patch.edges(model, pairs.tokens, pairs.source, pairs.metric)

    Args:
        model: one with a tokenizer, where the file has texts.
        file: CSV with a header, or JSON Lines with one object in each line. The columns are `clean`, the prompt;
            `answer` and `wrong`, two texts of one token that continue it (with the space before a word); `corrupted`,
            the prompt's partner, which may be missing; and labels under any other names. JSON may have token ids in
            the place of texts, which need no tokenizer.
        side: "left" or "right", where padding goes; by default that of the model's tokenizer.

    Raises `CircuitsError`, which names the row, from 1, for a file that cannot be read or is empty, a row without one
    of the columns, and an answer that is not one token after its prompt.
    """
    rows = _read_file_rows(Path(file))
    clean = prompts(model, [row["clean"] for row in rows], side)
    hooked = HookedModel(model)
    ids = {
        name: [_answer_token_id(hooked, clean, at, name, row[name]) for at, row in enumerate(rows)]
        for name in NEEDED[1:]
    }
    for number, pair in enumerate(zip(*ids.values(), strict=True), start=1):
        if len(set(pair)) == 1:
            raise CircuitsError(f"{CALLER}: row {number}: answer and wrong are the same token")
    corrupted = prompts(model, [row[CORRUPTED] for row in rows], side) if CORRUPTED in rows[0] else None
    labels = {name: tuple(row[name] for row in rows) for name in rows[0] if name not in TEXTS}
    return PromptPairs(clean, logit_difference(ids["answer"], ids["wrong"]), labels, corrupted)


def _read_file_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, of which each has the columns of the first and texts where texts must be."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix.lower() == ".csv":
            rows: list[Any] = list(csv.DictReader(io.StringIO(text, newline="")))
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise CircuitsError(f"{CALLER}: {file} is no CSV or JSON Lines that can be read: {problem}") from None
    if not rows:
        raise CircuitsError(f"{CALLER}: {file} has no rows; its columns are {', '.join(TEXTS)}")
    columns = [*filter(None, rows[0])] if isinstance(rows[0], dict) else []
    if missing := [name for name in NEEDED if name not in columns]:
        raise CircuitsError(f"{CALLER}: {file} has no column {missing[0]}; it has {', '.join(columns)}")
    for number, row in enumerate(rows, start=1):
        # What a CSV row has beyond the header stands under None.
        if not isinstance(row, dict) or not row.keys() <= {*columns}:
            hint = "; put a text that has a comma in quotes" if isinstance(row, dict) and None in row else ""
            raise CircuitsError(
                f"{CALLER}: {file}, row {number}: not the columns of row 1, or of the header{hint}"
            )
        for name in columns:
            if row.get(name) in (None, "", []):
                raise CircuitsError(f"{CALLER}: {file}, row {number}: nothing in column {name}")
    return rows


def _answer_token_id(hooked: HookedModel, clean: Prompts, row: int, name: str, text: Any) -> int:
    """Returns the one token that an answer is after its prompt."""
    if is_whole(text, 0):
        return int(text)
    if not isinstance(text, str):
        raise CircuitsError(
            f"{CALLER}: row {row + 1}: {name} is a text or a token id, got {format_value(text)}"
        )
    found = continuation_ids(hooked, clean, row, int(clean.lengths[row]), text)
    if found is None or len(found) != 1:
        tokens = "no tokens of its own" if not found else f"{len(found)} tokens"
        raise CircuitsError(
            f"{CALLER}: row {row + 1}: {name} {text!r} is {tokens} after its prompt; give a text of one token, "
            "with the space before a word"
        )
    return found[0]
