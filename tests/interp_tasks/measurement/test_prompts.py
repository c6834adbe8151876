"""A Hugging Face folder becomes a run whose model and tokenizer are its own; commands measure on a file of prompts."""

import json

import pytest
import torch

import tasks
from interp_tasks import import_checkpoint, load_checkpoint
from interp_tasks.errors import UserError

pytest.importorskip("tokenizers")
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["<pad>", "<s>", "</s>", *["the", "a", "girl", "boy", "dog", "saw", "found", "She", "He", "."]]
SIZES = {"vocab_size": len(WORDS), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "gpt2": transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES),
    # A name that transformer-lens takes for a sign of its own; grouped keys, tied embeddings.
    "gemma-llama": transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        **SIZES,
    ),
}


def save_model(name, folder):
    """Writes a random model of many sizes of weights with its tokenizer; returns it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    spelled = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spelled.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=spelled, **ends).save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_computes_what_the_folders_model_does(name, tmp_path):
    own = save_model(name, tmp_path / name)
    (imported,) = import_checkpoint(tmp_path / name, tmp_path / "run", step=7)
    assert (imported.step, imported.transposed) == (7, ())
    model = load_checkpoint(tmp_path / "run").model
    ids = model.to_tokens("the girl saw a dog .")
    assert ids.tolist() == [[1, 3, 5, 8, 4, 7, 12]]
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids).log_softmax(-1), own(ids).logits.log_softmax(-1), atol=1e-4, rtol=0
        )


def test_folders_that_become_no_run(tmp_path):
    def refused(source, **options):
        with pytest.raises(UserError) as caught:
            import_checkpoint(source, tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()
        return str(caught.value)

    save_model("gpt2", tmp_path / "gpt2")
    assert "leave config out" in refused(tmp_path / "gpt2", config={"act_fn": "relu"})
    (tmp_path / "none").mkdir()
    assert "no Hugging Face tokenizer" in refused(tmp_path / "gpt2", tokenizer=tmp_path / "none")
    (tmp_path / "gpt2" / "model.safetensors").rename(tmp_path / "gpt2" / "other.safetensors")
    assert "holds no causal language model in safetensors" in refused(tmp_path / "gpt2")
    config = transformers.GPTBigCodeConfig(n_embd=16, n_layer=1, n_head=2, n_positions=32, **SIZES)
    transformers.GPTBigCodeForCausalLM(config).save_pretrained(tmp_path / "code")
    assert "makes no HookedTransformer of GPTBigCodeForCausalLM" in refused(tmp_path / "code")


@pytest.fixture
def run(tmp_path):
    """A run of the Llama, and a file of prompts of five to seven tokens."""
    save_model("gemma-llama", tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "run")
    lines = []
    for who, other, answer, wrong in (("girl", "boy", " She", " He"), ("boy", "girl", " He", " She")):
        for end in ("saw a dog", "found dog", "found the girl", "saw dog", "saw the boy"):
            clean, corrupted = (f"the {one} {end} ." for one in (who, other))
            line = {"clean": clean, "corrupted": corrupted, "answer": answer, "wrong": wrong}
            lines.append(line | {"who": who, "words": len(clean.split())})
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return lines


def test_every_command_measures_on_prompts(run, call, tmp_path):
    shared = ["--ckpt", "run", "--prompts", "prompts.jsonl", "--format", "json"]

    def rows(*command):
        code, out, err = call(*command, *shared)
        assert code == 0, err
        return json.loads(out)

    (row, accuracy) = rows("ablation", "--heads", "0.1", "--mode", "zero")
    model = load_checkpoint("run").model
    hooks = [("blocks.0.attn.hook_z", lambda z, hook: z.index_fill(2, torch.tensor([1]), 0.0))]
    found = []
    for line in run:
        right, wrong = (WORDS.index(line[name].strip()) for name in ("answer", "wrong"))
        tokens = model.to_tokens(line["clean"])
        both = model(tokens), model.run_with_hooks(tokens, fwd_hooks=hooks)
        found.append([(logits[0, -1, right] - logits[0, -1, wrong]).item() for logits in both])
    assert (row["metric"], row["n"], accuracy["metric"]) == ("logit_difference", 10, "accuracy")
    assert (row["baseline"], row["value"]) == pytest.approx(torch.tensor(found).mean(0).tolist(), abs=1e-5)
    assert len(rows("patch", "--source", "corrupted", "--heads", "each")) == 16
    assert len(rows("heads", "--mode", "mean")) > 16
    assert {one["variant"] for one in rows("lens")} >= {"read-out after layer 1"}
    assert len(rows("attention")) > 8
    probed = {one["variant"] for one in rows("probe", "--site", "resid_post.1")}
    assert probed == {"who resid_post.1", "words resid_post.1"}
    assert rows("circuit", "--random", "2", "--no-curve")


REFUSED = {
    "ablation --ckpt run": "say --task NAME or --prompts FILE with texts and answers",
    "ablation --ckpt run --prompts nowhere.csv": "--prompts nowhere.csv: no such file",
    "ablation --ckpt run --prompts short.csv": "has no column wrong; it has clean, answer",
    "ablation --ckpt run --prompts prompts.jsonl --split test": "give --split or --prompts, not both",
    "ablation --ckpt run --prompts prompts.jsonl --task miiii": "give --task or --prompts, not both",
    "ablation --ckpt run --prompts prompts.jsonl --metric loss": "choose logit_difference or accuracy",
    "lens --ckpt other --prompts prompts.jsonl": "has no tokenizer, which texts need",
    "probe --ckpt run --prompts prompts.jsonl --target name": "there are who, words",
    "heads --ckpt run --prompts prompts.jsonl --by-class": "found on other examples, which a file has not",
}


def test_what_a_user_mistakes_is_one_line(run, call, tmp_path):
    tiny = tasks.get("modular-addition", p=11)
    torch.save(tiny.build_model().state_dict(), tmp_path / "w.pt")
    import_checkpoint(tmp_path / "w.pt", tmp_path / "other", task=tiny)
    (tmp_path / "short.csv").write_text("clean,answer\nthe girl, She")
    for command, message in REFUSED.items():
        code, _, err = call(*command.split())
        assert (code, message in err, len(err.splitlines())) == (2, True, 1), err
