"""Answers given as texts are the tokens that follow their prompts; prompts have one BOS."""

import json

import pytest
import torch

from circuits import CircuitsError, ablate, logit_difference, prompts, read_prompts, run, sweep

families = pytest.importorskip("tests.circuits.families")

PIECES = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "\u2581",
    "\u2581One",
    "\u2581day",
    "\u2581She",
    "\u2581He",
    "lly",
    "ck",
]
PIECES += ["(", ".", "Paris", "Rome", "\u2581Paris", "\u2581Rome"]
ID = {piece.replace("\u2581", " "): number for number, piece in enumerate(PIECES)}
TEXTS = ["One day.", "One day . One ("]


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    """A bridge whose tokenizer has pieces of words, with the space before them, and puts a BOS first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(PIECES)], unk_id=3))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = families.save("llama", tmp_path_factory.mktemp("spelled"))
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return families.boot(folder)


def test_an_answer_is_what_follows_its_prompt(spelled, tmp_path):
    made = prompts(spelled, TEXTS)
    encoded = prompts(spelled, spelled.tokenizer(TEXTS, padding=True, return_tensors="pt"))
    assert encoded.texts is None
    assert torch.equal(encoded.tokens, made.tokens)
    answers = [" She", "Paris"], [" He", "Rome"]
    ids = [ID[" She"], ID["Paris"]], [ID[" He"], ID["Rome"]]
    rows = [
        dict(zip(("clean", "answer", "wrong"), row, strict=True)) for row in zip(TEXTS, *answers, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(spelled, tmp_path / "rows.jsonl").metric == logit_difference(*ids)
    for right, wrong, position in (
        (answers, ids, -1),
        # Not at the end, the prompt is what is read so far; of longer answers, the first token is read.
        ((" Paris.", [[" One", " He day"]]), (ID[" Paris"], [[ID[" One"], ID[" He"]]]), [3, 2]),
    ):
        text, number = logit_difference(*right, position), logit_difference(*wrong, position)
        for given in (made, encoded, made[[0, 1]]):
            output = run(spelled, given)
            assert torch.equal(text(output, given, spelled), number(output, given))
        zero = {"a": ablate.zero("0.1")}
        frames = [sweep(spelled, TEXTS, zero, one, flips=9).frame for one in (text, number)]
        assert frames[0].equals(frames[1])


@pytest.mark.parametrize(
    ("text", "right", "wrong", "message"),
    [
        ("One day.", " She", " Shelly", "answers ' She' and ' Shelly' begin with the same token, 7"),
        (
            "One day.",
            [[" Shelly", " One"]],
            " Sheck",
            "begin with the same token, 7; put what they share into the",
        ),
        ("One day ", "She", "He", "example 0: the tokens of prompt and answer 'She' together do not begin"),
    ],
)
def test_answers_that_no_token_tells_apart(spelled, text, right, wrong, message):
    made = prompts(spelled, text)
    with pytest.raises(CircuitsError, match=message):
        logit_difference(right, wrong)(run(spelled, made), made, spelled)


def test_an_answer_in_a_masks_place(hf_model):
    """Of a model that fills in, an answer is not read after its prompt."""
    bert = hf_model("bert")
    made = prompts(bert, "w4 w9 w7")
    output = run(bert, made)
    assert torch.equal(
        logit_difference("w3", "w5", 1)(output, made, bert), logit_difference(6, 8, 1)(output, made)
    )
    with pytest.raises(CircuitsError, match=r"the answer 'w3 w4' is 2 tokens, \[6, 7\]; give one"):
        logit_difference("w3 w4", "w5")(output, made, bert)


def test_a_text_that_begins_with_bos_gets_no_second(spelled, hf_model):
    for model, text in ((spelled, TEXTS[1]), (hf_model("gpt2"), "w4 w9"), (hf_model("llama"), "w4 w9")):
        made = prompts(model, text)
        assert int(made.tokens[0, 0]) == 1
        again = prompts(model, [f"<s>{text}", text])
        assert torch.equal(again.tokens, made.tokens.expand(2, -1))
        assert torch.equal(run(model, f"<s>{text}"), run(model, made))
