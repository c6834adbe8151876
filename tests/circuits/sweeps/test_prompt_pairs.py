"""Prompts and answers from a file: the numbers are those of each prompt alone; a mistake is one line with its row."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

from circuits import ablate, patch, read_prompts, run, sweep

ROWS = [
    {"clean": "w4 w9 w7 w3", "corrupted": "w5 w9 w7 w3", "answer": " w1", "wrong": " w2", "kind": "a"},
    {"clean": "w8 w2", "corrupted": "w8 w6", "answer": " w3", "wrong": " w1", "kind": "b"},
    {"clean": "w1 w3 w5", "corrupted": "w2 w3 w5", "answer": " w9", "wrong": " w4", "kind": "a"},
]


def written(folder, rows, name="prompts.csv"):
    file = folder / name
    with file.open("w", newline="", encoding="utf-8") as opened:
        if file.suffix == ".csv":
            writer = csv.DictWriter(opened, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        else:
            opened.writelines(json.dumps(row) + "\n\n" for row in rows)
    return file


@pytest.fixture
def model(hf_model):
    return hf_model("llama")


@pytest.mark.parametrize("side", ["left", "right"])
def test_numbers_are_those_of_each_prompt_alone(model, tmp_path, side):
    pairs = read_prompts(model, written(tmp_path, ROWS), side)
    assert read_prompts(model, written(tmp_path, ROWS, "prompts.jsonl"), side).tokens == pairs.tokens
    assert (len(pairs), pairs.labels) == (3, {"kind": ("a", "b", "a")})
    assert sorted(pairs.tokens.lengths.tolist()) == [3, 4, 5]  # with <s>
    variants = {"z": ablate.zero("0.1"), "patch": patch.activations("z", pairs.source, heads="1.0")}
    frame = sweep(model, pairs.tokens, variants, pairs.metric, flips=9).frame.set_index("variant")
    alone = torch.zeros(3, 3, dtype=torch.float64)
    for row, line in enumerate(ROWS):
        edits = {"z": ablate.zero("0.1"), "patch": patch.activations("z", line["corrupted"], heads="1.0")}
        right, wrong = (
            model.tokenizer(line[name].strip(), add_special_tokens=False)["input_ids"][0]
            for name in ("answer", "wrong")
        )
        for at, edit in enumerate([(), (edits["z"],), (edits["patch"],)]):
            logits = run(model, line["clean"], *edit)[0, -1]
            alone[at, row] = logits[right] - logits[wrong]
    means = alone.mean(1).tolist()
    assert frame["baseline"].tolist() == pytest.approx([means[0]] * 2, abs=1e-5)
    assert frame["value"][["z", "patch"]].tolist() == pytest.approx(means[1:], abs=1e-5)
    part = pairs[1:]
    assert part.labels == {"kind": ("b", "a")}
    for same in (pairs[[1, 2]], pairs[[False, True, True]], pairs[torch.tensor([False, True, True])]):
        assert (same.source, same.metric, same.labels) == (part.source, part.metric, part.labels)
    assert (pairs[1].tokens, pairs[-1].labels, len(pairs[[]])) == (part[:1].tokens, {"kind": ("a",)}, 0)
    assert "no examples" in repr(pairs[:0])
    assert (pairs[::-1].labels, pairs.tokens[::-1][-1]) == (
        {"kind": ("a", "b", "a")},
        pairs.tokens[np.int64(0)],
    )
    torch.testing.assert_close(
        part.metric(run(model, part.tokens), part.tokens), alone[0, 1:], atol=1e-5, rtol=0
    )


def test_token_ids_need_no_tokenizer(tmp_path, causal):
    rows = [
        {"clean": [3, 4, 5, 3], "corrupted": [3, 4, 2, 3], "answer": 4, "wrong": 5},
        {"clean": [8, 2], "corrupted": [8, 3], "answer": 2, "wrong": 6},
    ]
    model = causal
    pairs = read_prompts(model, written(tmp_path, rows, "prompts.jsonl"))
    found = pairs.metric(run(model, pairs.tokens), pairs.tokens)
    alone = [run(model, [row["clean"]])[0, -1] for row in rows]
    expected = torch.stack(
        [one[row["answer"]] - one[row["wrong"]] for one, row in zip(alone, rows, strict=True)]
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_partners_of_other_lengths(model, tmp_path):
    pairs = read_prompts(model, written(tmp_path, [ROWS[0], ROWS[1] | {"corrupted": "w8 w6 w1"}]))
    assert len(pairs.corrupted) == 2
