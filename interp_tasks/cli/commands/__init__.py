"""Lists the commands that are no experiments. Each is the file of its name, which has one ``Command``.

Beside them lie the commands of those experiments whose signature does not say all.
"""

#: Place -> name -> first line of the help, as in the docstring of the command (a test compares them).
COMMANDS: dict[str, dict[str, str]] = {
    "Train": {
        "train": "Train a task's model into a run folder.",
        "grid": "Train many models, and run experiments on all of them: one file, one table, one page.",
    },
    "tasks": {
        "list": "List the tasks there are, with their presets.",
        "cost": "Say what training would take: parameters, FLOP, memory, disk, time.",
    },
    "runs": {
        "checkpoints": "List the checkpoints of a run, and where its drop lies.",
        "report": "Show a run on one page: its training curve and drop, and a slider over its checkpoints.",
        "search": "Search hyper-parameters with Optuna: a training run for every trial.",
        "zoo": "List the trained models that ship, or ship those of a recipe.",
    },
    "Papers": {
        "reproduce": "A paper's experiments on the runs that are there: published numbers beside ours."
    },
}
