"""Where a model's answers come from: copied inputs, its own earlier answers, single entries of the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.activations_in_passes import split_into_passes
from interp_tasks.measurement.confidence_intervals import bootstrap_rows
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.options_and_examples import DEFAULT_SAMPLES, Options
from interp_tasks.measurement.result import Result, Row, experiment
from interp_tasks.papers.matrix_completion.model_versus_methods import forward_on_cpu, require_declaration

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from tasks.base import InputPerturbations

FORCED, GREEDY = "teacher forcing", "greedy"
#: How far values move, up or down.
SHIFT = 0.1
CHANGE, PART = "mean |change|", "share of all change"
INTERVALS = "Intervals: 95%, bootstrap over examples; effects are paired."


@experiment(judged_by_task=True, without=("tokens", "prompts"))
def copying(refs: str | Sequence[str], **options: Unpack[Options]) -> Result:
    """Put another token at hidden entries, and see whether the output there copies it.

    Inputs (the ``variant``) are the task's own matrices, and others of full rank that nobody could complete. ``value``
    takes for the right answer what stands in the input (0 for MASK): its ``mse_masked`` is L'_mask. ``baseline`` takes
    the matrix itself, so that a negative ``effect`` says that the output is nearer to a copy.

    Gopalani, Lubana, Hu 2024, section 3.1.1 and table 1.

    Args:
        refs: one or several REFs; all see the same examples.
        options: samples (512 in the paper), seed, split, task, task_config, device, progress: see :class:`Options`.
    """

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures one checkpoint on inputs whose hidden entries hold a token, against token and truth."""
        task: Any = subject.task
        drawn: dict[str, Any] = {"seed": subject.seed, "split": subject.labels["split"]}
        n = options.get("samples") or DEFAULT_SAMPLES
        inputs = require_declaration(task, "copying_inputs", n=n, **drawn)
        rows = []
        for name, (copied, original) in inputs.items():
            output = forward_on_cpu(subject.model, copied.tokens)
            metrics, baseline = task.metrics(output, copied), task.metrics(output, original)
            compared = bootstrap_rows(metrics, baseline, subject.seed)
            rows += [{**row, "variant": name, "intervention": "token at hidden entries"} for row in compared]
        return rows

    result = measure("copying", refs, options, measure_checkpoint, config={})
    note = "value: the error where a copy of the input is right, 0 in place of MASK. baseline: where the matrix is."
    return replace(result, notes=(note, INTERVALS))


@experiment(judged_by_task=True, without=("tokens", "prompts"))
def decoding(refs: str | Sequence[str], **options: Unpack[Options]) -> Result:
    """See what a language model of a task answers when it goes on from its own answers (greedy decoding).

    Beside the same with the true tokens before each answer (teacher forcing).

    Args:
        refs: one or several REFs; all see the same examples.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.
    """

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures one checkpoint with the right entries before each answer, and with its own answers before it."""
        import torch

        task: Any = subject.task
        greedy = require_declaration(task, "decoded", model=subject.model, batch=subject.batch)
        with torch.no_grad():
            forced = task.metrics(subject.model(subject.tokens), subject.batch)
        rows = {
            FORCED: bootstrap_rows(forced, None, subject.seed),
            GREEDY: bootstrap_rows(
                {name: greedy[name] for name in forced if name in greedy}, forced, subject.seed
            ),
        }
        about = {name: {"variant": name, "intervention": name, "engine": "naive"} for name in rows}
        return [{**row, **about[name]} for name, several in rows.items() for row in several]

    result = measure("decoding", refs, options, measure_checkpoint, config={})
    note = "baseline: of greedy decoding the same with the true tokens before each answer."
    return replace(result, notes=(INTERVALS, note))


@experiment(samples=64, without=("tokens", "prompts"))
def influence(refs: str | Sequence[str], **options: Unpack[Options]) -> Result:
    """See which observed entries move which hidden ones: change one at a time.

    Pooled over pairs in the same row, in the same column and neither: per kind of pair (the ``intervention``) the mean
    absolute change of the output, and the kind's share of all change.

    Args:
        refs: one or several REFs; all see the same examples and the same changes.
        options: samples (default 64), seed, split, task, task_config, device, progress: see :class:`Options`.
    """

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        found = declared_perturbations(subject)
        moved = pairwise_output_changes(subject, found)
        return [
            {**row, "variant": "model", "intervention": kind, "engine": "naive"}
            for kind in found.kinds
            for row in change_and_share_rows(kind, moved, found, subject.seed)
        ]

    result = measure("influence", refs, options, measure_checkpoint, config={"shift": SHIFT})
    notes = (
        f"One entry at a time is given its value ± {SHIFT:g}; change: of the output at each hidden entry.",
        "share of all change: its baseline is the kind's share of all pairs.",
        INTERVALS,
    )
    return replace(result, notes=notes)


def declared_perturbations(subject: LoadedCheckpoint) -> InputPerturbations:
    """Returns the changes of the input that the task declares."""
    task: Any = subject.task
    influences: InputPerturbations | None = task.influences(subject.batch, SHIFT, subject.seed)
    if influences is None:
        raise UserError(f"task {task.name!r} does not say what may be changed in its inputs (influences)")
    if task.d_vocab_out != 1:
        raise UserError(
            f"task {task.name!r} has {task.d_vocab_out} outputs per position; influence needs one"
        )
    if not (influences.changed[:, :, None] & influences.read[:, None]).any():
        raise UserError(f"{subject.labels['ref']}: no example has both an entry to change and one to read")
    return influences


def pairwise_output_changes(subject: LoadedCheckpoint, declared: InputPerturbations) -> Tensor:
    """Returns the changes of outputs ``[batch changed read]``, float64; 0 where no input was changed."""
    import torch

    from circuits import run

    model, tokens = subject.model, subject.tokens
    examples, places = declared.changed.nonzero(as_tuple=True)
    edited = tokens[examples]
    edited[torch.arange(len(edited), device=tokens.device), places] = declared.tokens[examples, places]
    clean, after = (
        torch.cat([run(model, part)[..., 0].double() for part in split_into_passes(given)])
        for given in (tokens, edited)
    )
    moved = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.float64, device=tokens.device)
    moved[examples, places] = after - clean[examples]
    return moved


def change_and_share_rows(kind: str, changes: Tensor, declared: InputPerturbations, seed: int) -> list[Row]:
    """Returns the mean change of a kind of pair, and its share of all change beside that of all pairs; none of none."""
    sizes = changes.abs()
    pairs = (declared.changed[:, :, None] & declared.read[:, None]).double()
    inside = pairs * declared.kinds[kind]
    change, number = (sizes * inside).sum((1, 2)), inside.sum((1, 2))
    if not number.sum():
        return []
    total, all_pairs = (sizes * pairs).sum((1, 2)), pairs.sum((1, 2))
    share = bootstrap_rows({PART: (change, total)}, {PART: (number, all_pairs)}, seed)
    return [*bootstrap_rows({CHANGE: (change, number)}, None, seed), *share]
