"""Reads the metrics of a run's log by column. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from interp_tasks.checkpoints.run_files import COMPRESSED, METRICS_FILE, log_file, read_log
from interp_tasks.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Steps = NDArray[np.int64]
    Values = NDArray[np.float64]

#: Bytes of a log that are read at once.
BLOCK = 2**23


def read_columns(path: Path) -> tuple[dict[tuple[str, str], tuple[Steps, Values]], int | None]:
    """Reads the metrics of a log, one column each, and the last step; a last line that is unfinished is left out.

    Raises:
        UserError: for a missing or mangled log.
    """
    import numpy as np
    import pyarrow as arrow
    import pyarrow.json

    file = log_file(path, METRICS_FILE)
    if not file.exists():
        raise UserError(f"{file} is missing: the run has logged nothing")
    parts: dict[tuple[str, str], list[tuple[Steps, Values]]] = {}
    last, lines = -1, 0
    for block in blocks_of(file):
        try:
            table = pyarrow.json.read_json(arrow.BufferReader(block))
        except arrow.ArrowInvalid as error:
            raise UserError(f"{file} is mangled after line {lines}: {str(error).splitlines()[0]}") from None
        if "step" not in table.column_names or not arrow.types.is_integer(table["step"].type):
            raise UserError(
                f"{file} is mangled after line {lines}: a line is not an object with an integer step"
            )
        steps = table["step"].to_numpy()
        wrong = np.flatnonzero(np.diff(steps, prepend=last) <= 0)
        if len(wrong) or table["step"].null_count:
            line = lines + 1 + (int(wrong[0]) if len(wrong) else 0)
            raise UserError(f"{file} is mangled: line {line} has no later step than the one before it")
        last, lines = int(steps[-1]), lines + len(steps)
        for split in {"train", "validation"} & {*table.column_names}:
            column = table[split]
            if arrow.types.is_null(column.type):
                continue
            if not arrow.types.is_struct(column.type):
                raise UserError(f"{file} is mangled: a line has {split} metrics that are not an object")
            has = column.is_valid()
            of_split = steps[has.to_numpy()]
            for name, values in zip(column.type.names, column.filter(has).flatten(), strict=True):
                if values.type in (arrow.int64(), arrow.float64(), arrow.null()):
                    numbers = np.asarray(values.cast(arrow.float64()).to_numpy(), dtype=np.float64)
                    parts.setdefault((split, name), []).append((of_split, numbers))
    columns = {
        key: (np.concatenate([one for one, _ in several]), np.concatenate([one for _, one in several]))
        for key, several in parts.items()
    }
    return columns, last if lines else None


def blocks_of(file: Path) -> Iterator[bytes]:
    """Yields the finished lines of a log, some megabytes at a time."""
    stream = (
        io.BytesIO(read_log(file, "what the run has logged"))
        if file.suffix == COMPRESSED
        else file.open("rb")
    )
    with stream:
        rest = b""
        while block := stream.read(BLOCK):
            lines, end, rest = (rest + block).rpartition(b"\n")
            if end:
                yield lines
