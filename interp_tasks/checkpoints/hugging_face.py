"""A Hugging Face model's folder as a ``HookedTransformer``, and the tokenizer that a run keeps of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformer_lens import HookedTransformer

from interp_tasks.checkpoints.architecture import config_to_json, model_from_json
from interp_tasks.checkpoints.run_files import read_json
from interp_tasks.errors import UserError

#: In a run folder, what its texts are tokenised with.
TOKENIZER_FOLDER = "tokenizer"
#: Log-probabilities of an import and of the model itself may differ by so much.
TOLERANCE = 1e-3
#: Tokens on which the two are compared.
COMPARED = 16
IN_PYTHON = (
    "use circuits on it in Python: TransformerBridge.boot_transformers (docs/tutorials/hugging-face.md)"
)


def is_hugging_face(source: Path) -> bool:
    """Tells whether a folder has a Hugging Face model's config, which names its kind."""
    file = source / "config.json"
    return file.is_file() and "model_type" in read_json(file, "a model's config")


def read_hugging_face(folder: Path) -> tuple[dict[str, Any], HookedTransformer]:
    """Returns the config of a folder's model, as a checkpoint stores it, and the model as a HookedTransformer.

    Nothing of the folder is run, and nothing is fetched: weights are safetensors.
    """
    from transformer_lens import loading_from_pretrained
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        own = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, local_files_only=True)
        own = own.float().eval()
    # What is wrong with a config or with weights shows as whatever transformers runs into first.
    except Exception as error:
        raise UserError(f"{folder} holds no causal language model in safetensors: {_line(error)}") from None
    try:
        with tempfile.TemporaryDirectory() as temporary:
            # transformer-lens guesses architectures from words in the path, and reads of GPT-2 an n_ctx that
            # transformers no longer writes.
            neutral = Path(temporary) / "model"
            neutral.mkdir()
            settings = read_json(folder / "config.json", "a model's config")
            length = {"n_ctx": settings["n_positions"]} if "n_positions" in settings else {}
            (neutral / "config.json").write_text(json.dumps(length | settings), encoding="utf-8")
            config = loading_from_pretrained.get_pretrained_model_config(
                str(neutral), device="cpu", dtype=torch.float32
            )
            state = loading_from_pretrained.get_pretrained_state_dict(str(neutral), config, own)
    except Exception as error:
        raise UserError(
            f"{folder}: transformer-lens makes no HookedTransformer of {type(own).__name__} ({_line(error)}); "
            f"{IN_PYTHON}"
        ) from None
    described = config_to_json(config, torch.float32) | {
        "tokenizer_name": None,
        "model_name": folder.resolve().name,
    }
    model = model_from_json(described, folder)
    names = {name for name, _ in model.named_parameters()}
    model.load_state_dict({name: each for name, each in state.items() if name in names}, strict=False)
    check_same(model, own, folder)
    return described, model


def check_same(model: HookedTransformer, own: Any, folder: Path) -> None:
    """Refuses an import that does not compute what the model itself does."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, (2, min(COMPARED, model.cfg.n_ctx)), generator=generator)
    with torch.no_grad():
        one, other = (each.double().log_softmax(-1) for each in (model(tokens), own(tokens).logits))
    difference = float((one - other).abs().max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"{folder}: its HookedTransformer computes something else (log-probabilities off by {difference:.2g}); "
            f"{IN_PYTHON}"
        )


def has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*"))


def save_tokenizer(folder: Path, run: Path) -> None:
    """Keeps the tokenizer of a folder in a run folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.save_pretrained(run / TOKENIZER_FOLDER)


def give_tokenizer(model: HookedTransformer, run: Path | None) -> None:
    """Gives a model the tokenizer that its run keeps, if any."""
    if run is None or not (run / TOKENIZER_FOLDER).is_dir():
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(run / TOKENIZER_FOLDER, local_files_only=True)
    except Exception as error:
        raise UserError(f"{run / TOKENIZER_FOLDER} holds no tokenizer: {_line(error)}") from None
    model.set_tokenizer(tokenizer)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
