"""Makes a run of weights that something else has trained: state_dicts of a HookedTransformer, a Hugging Face folder."""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor
from transformer_lens import HookedTransformer

from interp_tasks.checkpoints.checkpoint import (
    TOKENIZER_FOLDER,
    check_storable,
    config_to_json,
    dtype_name,
    model_from_json,
    one_line_error,
    save_checkpoint,
)
from interp_tasks.checkpoints.run_reader import (
    METRICS_FILE,
    check_run_target,
    checkpoint_folder,
    is_checkpoint_folder,
    is_run_folder,
    is_step_number,
    read_json,
    read_metrics,
)
from interp_tasks.checkpoints.run_writer import RunFolder, declared_drop
from interp_tasks.errors import UserError
from interp_tasks.file_io import read_file_bytes
from tasks.base import Task

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


def read_config_and_hooked_model(folder: Path) -> tuple[dict[str, Any], HookedTransformer]:
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
        raise UserError(
            f"{folder} holds no causal language model in safetensors: {one_line_error(error)}"
        ) from None
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
            f"{folder}: transformer-lens makes no HookedTransformer of {type(own).__name__} ({one_line_error(error)}); "
            f"{IN_PYTHON}"
        ) from None
    described = config_to_json(config, torch.float32) | {
        "tokenizer_name": None,
        "model_name": folder.resolve().name,
    }
    model = model_from_json(described, folder)
    names = {name for name, _ in model.named_parameters()}
    model.load_state_dict({name: each for name, each in state.items() if name in names}, strict=False)
    check_same_logits(model, own, folder)
    return described, model


def check_same_logits(model: HookedTransformer, own: Any, folder: Path) -> None:
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


Names = tuple[str, ...]

SUFFIXES = (".pt", ".pth", ".safetensors")
#: Where training scripts keep the weights among other things.
NESTED = ("model", "state_dict", "model_state_dict")
#: What wrappers put before every name.
WRAPPERS = ("module.", "_orig_mod.", "model.")
#: Tensors of a HookedTransformer that are no parameters, and are built anew.
BUFFERS = re.compile(r"(^|\.)(mask|IGNORE|rotary_sin|rotary_cos|alibi)$")
#: How columns of a log begin that are of either split.
SPLITS = {"train": "train", **dict.fromkeys(("test", "val", "valid", "validation"), "validation")}
#: What weights do not tell.
UNTOLD = ("act_fn", "normalization_type", "attention_dir")
#: Nor of a model without position embeddings.
UNTOLD_OF_ANGLES = ("positional_embedding_type", "n_ctx")


@dataclass(frozen=True)
class ImportedCheckpoint:
    """A checkpoint that was made of foreign weights.

    Attributes:
        path: the checkpoint folder.
        transposed: the names of the parameters whose axes were stored in another order.
        zeros: those that the file lacks, biases, which are 0.
    """

    path: Path
    step: int
    transposed: Names
    zeros: Names


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    task: Task | None = None,
    config: Mapping[str, Any] | None = None,
    step: int | None = None,
    log: str | Path | None = None,
    own_split: bool = False,
    tokenizer: str | Path | None = None,
) -> list[ImportedCheckpoint]:
    """Makes a run folder of a ``HookedTransformer``'s weights that something else has trained; returns its checkpoints.

    Sizes are read from the weights. Parameters may be stored with their axes in another order, as some training scripts
    do (W_E as [d_model, d_vocab]); which were is in the result. A square one is taken as it is.

    Args:
        source: a state_dict (``.pt``, ``.pth``, which are read without running what is pickled in them, or
            ``.safetensors``), or a folder of such files, each with its step in its name (``model_4000.pth``); or a
            Hugging Face folder (config.json, safetensors), whose tokenizer the run keeps.
        out: the run folder; of one that exists, ``source`` becomes further steps.
        task: what the model was trained on; its models have what the weights do not tell.
        config: fields of ``HookedTransformerConfig``, over those of the task: ``act_fn``, ``normalization_type`` and
            ``attention_dir`` cannot be read from weights.
        step: of a single file; default: the last number in its name, or 0.
        log: a CSV file or JSON Lines with a column ``step`` (or ``epoch``) and metrics (``accuracy``, ``train_loss``);
            with the metric of the task's drop among them, REFs such as ``@pre`` and ``@post`` work.
        own_split: whether the model was trained on the inputs that the task trains on; otherwise measures that tell
            training inputs from others ask which they were.
        tokenizer: a folder with a Hugging Face tokenizer, which the run keeps for texts; default: that of ``source``.

    Raises:
        UserError: in one line, for a file that holds something else, weights that are no such model's, or a setting
            that is missing.
    """
    folder = Path(source)
    check_run_target(Path(out))
    check_not_run_and_has_tokenizer(folder, tokenizer)
    lines = None if log is None else read_foreign_log(Path(log))
    if is_hugging_face(folder) and has_tokenizer(folder):
        tokenizer = tokenizer or folder
    # All before the folder is made, so that what is refused leaves none.
    described, models, arranged = architecture_models_and_changes(folder, step, task, dict(config or {}))
    for number, model in models.items():
        check_storable(model, task, number)
    of_task = None if task is None else {"name": task.name, **task.model_dump(mode="json")}
    info = {
        "imported": {"source": str(source), "own_split": own_split},
        "drop_metric": None if task is None else declared_drop(task),
    }
    with RunFolder.open(out, {"task": of_task, "model": described, "train": {}}, info) as run:
        if tokenizer is not None:
            save_tokenizer(Path(tokenizer), run.path)
        paths = {
            number: save_checkpoint(checkpoint_folder(run.path, number), model, task, number)
            for number, model in models.items()
        }
        log_later_lines(run, lines or [])
    return [ImportedCheckpoint(path, number, *arranged[number]) for number, path in paths.items()]


def check_not_run_and_has_tokenizer(source: Path, tokenizer: str | Path | None) -> None:
    """Refuses weights that are a run's already, and a folder that holds no tokenizer."""
    if is_run_folder(source) or is_checkpoint_folder(source if source.is_dir() else source.parent):
        raise UserError(
            f"{source} is of a run or checkpoint, which needs no import: --ckpt takes it as it is"
        )
    if tokenizer is not None and not has_tokenizer(Path(tokenizer)):
        raise UserError(f"{tokenizer} holds no Hugging Face tokenizer (tokenizer.json)")


def log_later_lines(run: RunFolder, lines: Sequence[Mapping[str, Any]]) -> None:
    """Logs the lines that an earlier import has not: those after its last."""
    logged = read_metrics(run.path) if (run.path / METRICS_FILE).is_file() else []
    for line in lines:
        if not logged or line["step"] > logged[-1]["step"]:
            run.log(line)


def architecture_models_and_changes(
    folder: Path, step: int | None, task: Task | None, config: dict[str, Any]
) -> tuple[dict[str, Any], dict[int, HookedTransformer], dict[int, tuple[Names, Names]]]:
    """Returns the architecture as JSON, and by step the models and what was changed to copy them in."""
    if is_hugging_face(folder):
        if config:
            raise UserError(f"{folder} says itself what its model is: leave config out")
        described, model = read_config_and_hooked_model(folder)
        return described, {step or 0: model}, {step or 0: ((), ())}
    files = weight_files_by_step(folder, step)
    states = {number: read_state_dict(file) for number, file in sorted(files.items())}
    described = infer_model_config(states[max(files)], task, config, files[max(files)])
    models = {number: model_from_json(described, files[number]) for number in states}
    copied = {
        number: copy_in_and_report_changes(models[number], states[number], files[number]) for number in models
    }
    return described, models, copied


def weight_files_by_step(source: Path, step: int | None) -> dict[int, Path]:
    """Returns the files by their steps."""
    if source.is_file():
        if source.suffix not in SUFFIXES:
            raise UserError(f"{source}: weights come as {', '.join(SUFFIXES)}")
        return {step_in_name(source) or 0 if step is None else step: source}
    if not source.is_dir():
        raise UserError(f"no file or folder {str(source)!r}")
    if (source / "adapter_config.json").is_file():
        raise UserError(
            f"{source} holds LoRA adapters: save the model that they are merged into (merge_and_unload)"
        )
    if step is not None:
        raise UserError(f"step {step}: {source} is a folder, whose files say their steps by their names")
    found: dict[int, Path] = {}
    for file in sorted(each for each in source.iterdir() if each.suffix in SUFFIXES):
        number = step_in_name(file)
        if number is None or number in found:
            raise UserError(f"{file}: name files by their steps, one each, such as model_4000{file.suffix}")
        found[number] = file
    if not found:
        raise UserError(f"{source} holds no weights ({', '.join(SUFFIXES)})")
    return found


def step_in_name(file: Path) -> int | None:
    numbers = re.findall(r"\d+", file.stem)
    return int(numbers[-1]) if numbers else None


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Returns the parameters in a file by their names in a ``HookedTransformer``, without buffers."""
    content = read_file_bytes(file, "a model's weights")
    try:
        if file.suffix == ".safetensors":
            state: Any = load_safetensors(content)
        else:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise UserError(
            f"{file} holds more than tensors, which would have to be run to be read: save model.state_dict()"
        ) from None
    except (SafetensorError, RuntimeError, KeyError, ValueError, EOFError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(state, Mapping):
        state = next((state[name] for name in NESTED if isinstance(state.get(name), Mapping)), state)
    named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    if not named or not any(isinstance(each, Tensor) for each in state.values()):
        raise UserError(f"{file} holds no state_dict: save model.state_dict()")
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): each for name, each in state.items()}
    found = {name: each for name, each in state.items() if not BUFFERS.search(name)}
    if "embed.W_E" not in found:
        raise UserError(
            f"{file} is no HookedTransformer's state_dict: it has {next(iter(state))} and no embed.W_E; of a Hugging "
            "Face model give the folder, with its config.json"
        )
    return found


def infer_model_config(
    state: Mapping[str, Tensor], task: Task | None, config: dict[str, Any], file: Path
) -> dict[str, Any]:
    """Returns the config of the model that the weights are of, as a checkpoint stores it."""
    told: dict[str, Any] = {}
    if "blocks.0.ln1.w" in state:
        told["normalization_type"] = "LN" if "blocks.0.ln1.b" in state else "RMS"
    if not any(".mlp." in name for name in state):
        told["act_fn"] = "relu"  # of an MLP that there is not
    asked = UNTOLD if "pos_embed.W_pos" in state else (*UNTOLD, *UNTOLD_OF_ANGLES)
    untold = [name for name in asked if name not in {**told, **config}]
    if task is None and untold:
        raise UserError(
            f"{file} does not tell {', '.join(untold)}: give the task, or a config file such as "
            '{"act_fn": "relu", "normalization_type": null, "attention_dir": "causal"}'
        )
    fields = {} if task is None else config_to_json(task.build_model().cfg, torch.float32)
    fields |= {**told, "dtype": dtype_name(state["embed.W_E"].dtype), "init_weights": False}
    return fields | infer_model_sizes(state, file) | config


def infer_model_sizes(state: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """Returns the sizes of the model that a state_dict is of, whatever the order of axes."""
    layers = {int(name.split(".")[1]) for name in state if name.startswith("blocks.")}
    try:
        query, embedding = state["blocks.0.attn.W_Q"].shape, state["embed.W_E"].shape
        keys = [
            state[f"blocks.0.attn.{name}"] for name in ("W_K", "_W_K") if f"blocks.0.attn.{name}" in state
        ]
        unembedding = state["unembed.W_U"].shape
        # The width is what embedding and queries share; where both axes fit, they are as TransformerLens has them.
        both = [size for size in (embedding[1], embedding[0]) if size in query[1:]]
        d_model = query[1] if len(set(both)) > 1 and query[1] in both else both[0]
        n_heads, d_head = query[0], query[2] if query[1] == d_model else query[1]
    except (KeyError, IndexError) as error:
        raise UserError(
            f"{file} is no HookedTransformer's state_dict: {error} is missing or of another form"
        ) from None
    # W_E and W_pos are [size, d_model], W_U and W_in [d_model, size].
    shapes = {"d_vocab": (embedding, True), "d_vocab_out": (unembedding, False)}
    for name, weight, rows_first in (
        ("d_mlp", "blocks.0.mlp.W_in", False),
        ("n_ctx", "pos_embed.W_pos", True),
    ):
        shapes |= {name: (state[weight].shape, rows_first)} if weight in state else {}
    return {
        "n_layers": max(layers) + 1,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "attn_only": "d_mlp" not in shapes,
        "gated_mlp": "blocks.0.mlp.W_gate" in state,
        "n_key_value_heads": keys[0].shape[0] if keys and keys[0].shape[0] != n_heads else None,
        **{
            name: shape[0] if shape[1] == d_model and (rows_first or shape[0] != d_model) else shape[1]
            for name, (shape, rows_first) in shapes.items()
        },
    }


def copy_in_and_report_changes(
    model: HookedTransformer, state: Mapping[str, Tensor], file: Path
) -> tuple[Names, Names]:
    """Copies weights into a model in place; returns the names of those that were transposed, and of those set to 0."""
    parameters = dict(model.named_parameters())
    left = sorted(set(state) - set(parameters))
    if left:
        raise UserError(
            f"{file} holds {left[0]}, which its model has no place for: say in config what the model is"
        )
    transposed, zeros = [], []
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name not in state and not name.rpartition(".")[2].startswith("b"):
                raise UserError(f"{file} lacks {name}")
            if name not in state:
                parameter.zero_()
                zeros.append(name)
                continue
            arranged = transpose_to_shape(state[name], tuple(parameter.shape), name)
            if arranged is None:
                raise UserError(
                    f"{file}: {name} has shape {list(state[name].shape)}, where its model has {list(parameter.shape)}"
                )
            if arranged is not state[name]:
                transposed.append(name)
            parameter.copy_(arranged)
    return tuple(transposed), tuple(zeros)


def transpose_to_shape(tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor | None:
    """Returns a weight in the shape that a ``HookedTransformer`` has; ``None`` where no order of its axes fits."""
    if tuple(tensor.shape) == shape:
        return tensor
    if tensor.ndim == len(shape) >= 2 and tuple(tensor.mT.shape) == shape:
        return tensor.mT
    if name.endswith("W_O") and tensor.ndim == 2 and tuple(tensor.shape) == (shape[2], shape[0] * shape[1]):
        return tensor.mT.reshape(shape)
    return None


def read_foreign_log(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log, CSV or JSON Lines, as a run's log has them.

    The split is told by the name of a column (``train_loss``, ``train/loss``, ``test_loss``, ``val_loss``); what names
    none is of validation.
    """
    text = read_file_bytes(file, "a log, as CSV or JSON Lines").decode("utf-8", errors="replace")
    is_csv = file.suffix == ".csv"
    rows: Iterable[Any] = (
        csv.DictReader(io.StringIO(text)) if is_csv else filter(str.strip, text.splitlines())
    )
    lines: list[dict[str, Any]] = []
    for number, given in enumerate(rows, start=1):
        try:
            row = (
                {key: json.loads(cell) for key, cell in given.items() if cell}
                if is_csv
                else json.loads(given)
            )
            is_of_numbers = all(value is None or type(value) in (int, float) for value in row.values())
        except (ValueError, TypeError, AttributeError, RecursionError):
            is_of_numbers = False
        if not is_of_numbers:
            raise UserError(
                f'{file}, row {number}: no numbers by name, as in {{"step": 0, "train_loss": 2.3}}'
            )
        step = row.pop("step", row.pop("epoch", None))
        if not is_step_number(step) or (lines and step <= lines[-1]["step"]):
            raise UserError(f"{file}, row {number}: no later whole number in a column named step or epoch")
        line = {"step": step, "train": {}, "validation": {}}
        for name, value in row.items():
            of, _, metric = name.replace("/", "_").partition("_")
            is_named = of in SPLITS and metric
            line[SPLITS[of] if is_named else "validation"][metric if is_named else name] = value
        lines.append(line)
    if not lines:
        raise UserError(f"{file} has no rows")
    return lines
