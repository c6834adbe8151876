"""``interp-run runs checkpoints``, ``runs import``, ``runs report`` and ``runs zoo``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints import ResolvedCheckpoint, find_marks, resolve
from interp_tasks.checkpoints.run_reader import TRAINING_STATE_FILE, read_json
from interp_tasks.cli.command_building import CommonOptions
from interp_tasks.cli.options import FORMAT, RUNS, PrintingOptions
from interp_tasks.cli.streams_and_exit_codes import progress_line
from interp_tasks.cli.tables import print_rows, print_wrapped, write_and_show
from interp_tasks.errors import UserError
from interp_tasks.file_io import check_writable_file
from interp_tasks.measurement.logged_runs import check_not_checkpoint
from interp_tasks.measurement.options_and_examples import Options
from interp_tasks.setting_and_seed_parsing import check_task_name, parse_task_settings

if TYPE_CHECKING:
    from typing_extensions import Unpack


def checkpoints(ckpt: RUNS, common: CommonOptions, format: FORMAT = "table") -> None:
    """List the checkpoints of a run, and where its drop lies."""
    for run in ckpt:
        check_not_checkpoint(run)
    found = [each for run in ckpt for each in resolve(f"{run}@all")]
    marks = {each.run_name: marks_or_empty(each) for each in {each.run_name: each for each in found}.values()}
    rows = [
        {
            "run": each.run_name,
            "ref": each.ref,
            "step": each.step,
            "marks": [mark for mark, step in marks[each.run_name].items() if step == each.step],
            "bytes": sum(file.stat().st_size for file in each.path.iterdir()),
            "dtype": each.meta["weights"]["dtype"],
            "training_state": (each.path / TRAINING_STATE_FILE).is_file(),
            "task": each.meta["task"]["name"] if each.meta["task"] else None,
            "metrics": each.meta["metrics"] or {},
            "saved_at": each.meta["saved_at"],
            "path": str(each.path),
        }
        for each in found
    ]
    if format != "table":
        print_rows(rows, format, [])
        return
    for name in marks:
        of_run = [row for row in rows if row["run"] == name]
        metrics = [without_per_answer(row["metrics"]) for row in of_run]
        names = list(dict.fromkeys(metric for each in metrics for metric in each))
        listed = [
            {**dict.fromkeys(names), **each, "checkpoint": f"@{row['step']}", "marks": row["marks"]}
            for row, each in zip(of_run, metrics, strict=True)
        ]
        print_rows(listed, "table", ["checkpoint", "marks", *names], [str(name), str(of_run[0]["task"])])


def marks_or_empty(checkpoint: ResolvedCheckpoint) -> dict[str, int]:
    """Returns the marks of a checkpoint's run, none where it shows no drop."""
    try:
        return find_marks(checkpoint.run_path or checkpoint.path, needed=())
    except UserError:
        return {}


def without_per_answer(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of all answers together: ``accuracy`` without ``accuracy_2``, ``accuracy_3`` and so on."""
    return {name: value for name, value in metrics.items() if name.rpartition("_")[0] not in metrics}


SOURCE = typer.Argument(
    metavar="SOURCE",
    help="A .pt, .pth or .safetensors file, a folder of one for each step, or a Hugging Face folder.",
)
SETTINGS = typer.Option("--set", metavar="KEY=VALUE", help="Setting of the task, as in task.p=11. Repeat.")
CONFIG = typer.Option("--config", metavar="FILE.json", help="Fields of the model's HookedTransformerConfig.")
STEP = typer.Option("--step", metavar="N", help="Step of a single file.", show_default="in its name, or 0")
LOG = typer.Option("--log", metavar="FILE", help="CSV or JSON Lines: step and metrics.")
OWN_SPLIT = typer.Option("--own-split", help="It was trained on the inputs that the task trains on.")
TOKENIZER = typer.Option(
    "--tokenizer",
    metavar="FOLDER",
    help="A Hugging Face tokenizer, for texts.",
    show_default="that of SOURCE",
)


def import_weights(
    source: Annotated[str, SOURCE],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run folder.")],
    printing: PrintingOptions,
    task: Annotated[
        str | None, typer.Option("--task", help="The task that the model was trained on.")
    ] = None,
    settings: Annotated[list[str], SETTINGS] = [],  # noqa: B006  (never changed)
    config: Annotated[Path | None, CONFIG] = None,
    step: Annotated[int | None, STEP] = None,
    log: Annotated[Path | None, LOG] = None,
    own_split: Annotated[bool, OWN_SPLIT] = False,
    tokenizer: Annotated[Path | None, TOKENIZER] = None,
) -> None:
    """Make a run of weights that something else has trained: a HookedTransformer's state_dicts, a Hugging Face folder.

    Sizes are read from the weights; what they do not tell (act_fn, normalization_type, attention_dir) comes from the
    task or from --config. Prints the task's metrics, which tell whether the weights arrived as they were meant.
    """
    import tasks
    from interp_tasks import import_checkpoint, load_checkpoint

    printing.import_tasks()
    fields = {} if config is None else read_json(config, "fields of a HookedTransformerConfig")
    if task is not None:
        check_task_name(task)
    of_task = None if task is None else tasks.get(task, **parse_task_settings(task, settings))
    given: dict[str, Any] = {"step": step, "log": log, "own_split": own_split, "tokenizer": tokenizer}
    rows: list[dict[str, Any]] = []
    for each in import_checkpoint(source, out, task=of_task, config=fields, **given):
        metrics: Mapping[str, Any] = {}
        if of_task is not None:
            batch = of_task.sample(256)
            metrics = tasks.pool(of_task.metrics(load_checkpoint(each.path).model(batch.tokens), batch))
        row: dict[str, Any] = {"run": str(out), "ref": f"{out}@{each.step}", "step": each.step}
        rows.append(row | {"transposed": each.transposed, "zeros": each.zeros, "metrics": metrics})
    shown: list[str] = []
    if printing.format == "table":
        changed = {"tensors transposed": "transposed", "tensors set to 0": "zeros"}
        shown = ["ref", *changed, *without_per_answer(rows[0]["metrics"])]
        for row in rows:
            row |= {name: len(row[key]) for name, key in changed.items()}
            row |= without_per_answer(row["metrics"])
    print_rows(rows, printing.format, shown)


CKPT = typer.Option(
    "--ckpt",
    metavar="RUN",
    help="A run folder or zoo:NAME; RUN@0:20000:2000 and the like for some checkpoints.",
)


def report(
    ckpt: Annotated[str, CKPT],
    printing: PrintingOptions,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="The page.")] = Path("report.html"),
    **options: Unpack[Options],
) -> None:
    """Show a run on one page: its training curve and drop, effects and attention of its heads at each checkpoint.

    One file, which opens offline, with a slider over the checkpoints; prints the numbers at its top.
    """
    from interp_tasks.report import report

    check_writable_file(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {out}: a report is a page: name a file that ends in .html")
    printing.import_tasks()
    with progress_line(printing.quiet) as progress:
        options["progress"] = progress
        result = report(ckpt, **options)
        page = result.page()
    rows = result.headlines()
    write_and_show(
        lambda: [page.write(out)], lambda: print_rows(rows, printing.format, list(rows[0])), printing.quiet
    )


#: Below the tables: what three of their columns say, and one word.
LEGEND = """\
stored: checkpoints, of several seeds the first one's (log: none)
final: the metric's level at the end, of several seeds the median
drop: steps from 10% to 90% of its change, of several seeds from the first on
none: no plateau before a fall, or no fall; final says which"""


def zoo(common: CommonOptions, format: FORMAT = "table") -> None:
    """List the trained models that ship."""
    from interp_tasks.zoo.shipped_runs_table import shipped_run_rows

    rows = shipped_run_rows()
    if format != "table":
        print_rows(rows, format, [])
        return
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        # A folder's name stands in the heading.
        folder, slash, name = row["name"].partition("/")
        heading = (row["task"], row["metric"], *([f"in {folder}/"] if slash else []))
        groups.setdefault(heading, []).append({**row, "name": name or folder})
    columns = ["name", "size", "seeds", "stored", "drop", "final"]
    for heading, members in groups.items():
        print_rows([zoo_row(row) for row in members], "table", columns, heading)
        print_wrapped()
    print_wrapped(LEGEND, "dim")


def zoo_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of the catalog as people read it."""
    seeds, drop = row["seeds"], row["drop"]
    fell = "none" if drop is None else f"{drop[0]:,}-{drop[1]:,}"
    if drop is not None and row["dropped"] < len(seeds):
        fell += f" ({row['dropped']}/{len(seeds)})"
    which = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    stored = (
        f"{row['checkpoints']} steps" if row["checkpoints"] > 1 else "1 step" if row["checkpoints"] else "log"
    )
    return {**row, "seeds": which, "stored": stored, "drop": fell, "final": f"{row['final']:.3g}"}
