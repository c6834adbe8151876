"""The options that every experiment has: which examples its checkpoints are shown, and the device that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from interp_tasks.errors import UserError
from interp_tasks.file_io import check_regular_file
from interp_tasks.measurement.option_parsing import DEVICE, SEED, SPLITS, check_choice
from interp_tasks.setting_and_seed_parsing import SEED_END, check_task_name, parse_task_settings

if TYPE_CHECKING:
    from torch import Tensor

    from tasks import Task

DEFAULT_SAMPLES = 256
#: Called as progress(done, total, what is being done).
Progress = Callable[[int, int, str], None]


class Options(TypedDict, total=False):
    """The keyword arguments of every experiment, and the options of its command: the fields of :class:`Examples`."""

    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", help="Examples.", show_default="256")
    ]
    seed: SEED
    split: Annotated[
        str | None, typer.Option("--split", help="train, validation or test.", show_default="test")
    ]
    task: Annotated[
        Any,
        typer.Option("--task", metavar="NAME", help="Task, for a checkpoint that names none."),
        str | None,
    ]
    task_config: Annotated[
        Mapping[str, Any] | Sequence[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of --task, as in task.n=4. Repeatable."),
        list[str],
    ]
    tokens: Annotated[
        Any,
        typer.Option(
            "--tokens",
            metavar="FILE.npy",
            help="Run on these tokens, an int array (batch, pos): every row, or the first --samples.",
        ),
        Path | None,
    ]
    prompts: Annotated[
        Any,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Run on these texts: CSV or JSON Lines with columns clean, corrupted, answer, wrong.",
        ),
        Path | None,
    ]
    device: DEVICE
    progress: Progress | None


@dataclass(frozen=True)
class Examples:
    """Which examples every checkpoint of one command sees, and where it is run.

    Attributes:
        samples: how many (``None``: 256 of a task, every row of ``tokens``).
        seed, split: of the task's sample; the seed also draws resamples and intervals.
        task: a task, or the name of one, for checkpoints that name none (or to use instead of theirs).
        task_config: settings of a task given by name; texts, such as ``"n=4"``, are read as ``--set`` is.
        tokens: int array ``[batch pos]``, or the ``.npy`` file of one, to run on in place of a task's.
        prompts: a file of prompts and answers, as ``circuits.read_prompts`` reads it, to run on in place of a task's.
        of_task: whether examples are a task's, and no tokens or prompts of the user's own.
        device: such as ``"cuda:1"``.
        progress: called as progress(done, total, what).
    """

    samples: int | None = None
    seed: int = 0
    split: str = "test"
    task: str | Task | None = None
    task_config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Any = None
    prompts: str | Path | None = None
    of_task: bool = True
    device: str = "cpu"
    progress: Progress | None = None

    @classmethod
    def of(cls, options: Options) -> Examples:
        """Returns the examples that an experiment's options ask for, checked as far as that needs no torch."""
        if unknown := options.keys() - Options.__annotations__.keys():
            known = ", ".join(Options.__annotations__)
            raise UserError(f"no argument {unknown.pop()!r}; there are {known}, and its own")
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        # Tokens and prompts are examples of the user's own, without a task or with answers of theirs.
        chosen = [name for name in ("tokens", "prompts", "task", "split") if name in given]
        if len(chosen) > 1 and chosen[0] in ("tokens", "prompts"):
            raise UserError(f"give --{chosen[1]} or --{chosen[0]}, not both")
        task, config = given.get("task"), given.get("task_config", {})
        if isinstance(task, str):
            check_task_name(task)
        if not isinstance(config, Mapping):
            given["task_config"] = parse_task_settings(task, config)
        asked = cls(**given, of_task=not {"tokens", "prompts"} & given.keys())
        if asked.samples is not None and asked.samples < 1:
            raise UserError(f"--samples {asked.samples}: at least one example is needed")
        if not 0 <= asked.seed < SEED_END:
            raise UserError(f"--seed {asked.seed}: a seed is a whole number from 0 to {SEED_END - 1}")
        check_choice("--split", asked.split, SPLITS)
        if not (asked.task is None or isinstance(asked.task, str) or hasattr(asked.task, "check_model")):
            raise UserError(f"task is a task or the name of one, not {asked.task!r}")
        for name in ("tokens", "prompts"):
            if isinstance(file := given.get(name), (str, Path)):
                check_regular_file(Path(file), f"--{name}")
        if asked.task_config and not isinstance(asked.task, str):
            raise UserError("--set here configures the task that --task NAME names: give --task too")
        return asked

    def describe(self) -> dict[str, Any]:
        prompts = {} if self.prompts is None else {"prompts": str(self.prompts)}
        tokens = str(self.tokens) if isinstance(self.tokens, (str, Path)) else type(self.tokens).__name__
        return {
            "samples": self.samples or (DEFAULT_SAMPLES if self.of_task else None),
            "seed": self.seed,
            "split": self.split if self.of_task else None,
            "task": getattr(self.task, "name", self.task),
            "task_config": dict(self.task_config),
            "tokens": None if self.tokens is None else tokens,
            **prompts,
            "device": self.device,
        }

    def given_task(self) -> Task | None:
        """Returns the task that is used in place of the checkpoints' own; ``None`` where none was given."""
        if not isinstance(self.task, str):
            return self.task
        from tasks import get

        return get(self.task, **self.task_config)

    def given_tokens(self) -> Tensor:
        """Returns the first ``samples`` rows of the tokens ``[batch pos]`` that were given."""
        import numpy
        import torch

        is_file = isinstance(self.tokens, (str, Path))
        array = numpy.asarray(read_npy(str(self.tokens), "--tokens") if is_file else self.tokens)
        if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
            source = self.tokens if is_file else "tokens"
            raise UserError(
                f"{source}: expected whole numbers [batch pos], got {array.dtype} {list(array.shape)}"
            )
        rows = numpy.ascontiguousarray(array[: self.samples], dtype=numpy.int64)
        return torch.from_numpy(rows).to(self.device)


def read_npy(source: str, option: str) -> Any:
    """Returns the array of an ``.npy`` file."""
    import numpy

    check_regular_file(Path(source), option)
    try:
        return numpy.load(source, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise UserError(f"{source} is not an .npy file of plain numbers (numpy.save makes one)") from None
