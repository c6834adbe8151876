"""Lists the commands, so that help need import none of them; a test compares the lines with their docstrings.

A new experiment has a line in ``COMMANDS``; another command in ``FUNCTIONS``, too.
"""

#: What ``reproduce`` takes, so that its help need not import what checks papers (a test compares them).
PAPERS = ("grokfast", "matrix-completion", "miiii", "nanda")

#: Panel or group -> name -> the first line of the help.
COMMANDS: dict[str, dict[str, str]] = {
    "Train": {
        "train": "Train a task's model into a run folder.",
        "grid": "Train many models, and run experiments on all of them: one file, one table.",
    },
    "tasks": {
        "list": "List the tasks there are, with their presets.",
        "cost": "Say what training would take: parameters, FLOP, memory, disk, time.",
        "data": "Look at a task's data: how many classes its answers have, and what guessing gets.",
    },
    "runs": {
        "checkpoints": "List the checkpoints of a run, and where its drop lies.",
        "import": (
            "Make a run of weights that something else has trained: a HookedTransformer's state_dicts, a Hugging "
            "Face folder."
        ),
        "report": (
            "Show a run on one page: its training curve and drop, effects and attention of its heads at each "
            "checkpoint."
        ),
        "search": "Search hyper-parameters with Optuna: a training run for every trial.",
        "zoo": "List the trained models that ship.",
        "curve": (
            "Put plateau, drop and final level of runs beside theory, and exact answers beside errors at "
            "stored steps."
        ),
        "drops": "Say whether each run drops, when, how sharply, from what level to what level.",
    },
    "Papers": {
        "reproduce": "A paper's claims: published numbers beside ours, and a verdict on each.",
        "demo": (
            "Ablate attention in shipped models before and after they learn abruptly: some twenty seconds."
        ),
    },
    "Look": {
        "attention": (
            "See what each attention head attends to: scores against templates, a class per head, mean maps."
        ),
        "fourier": (
            "Say which frequencies embeddings and neurons are made of, over the task's grid of inputs or of "
            "positions."
        ),
        "lens": (
            "Read the residual stream out after each layer, and the output without each component's direct "
            "effect."
        ),
        "probe": (
            "Fit linear probes from activations to what the task declares, and score them on other examples."
        ),
    },
    "Intervene": {
        "ablation": "Ablate attention heads, by default with uniform attention, and see which metrics move.",
        "circuit": (
            "Find the smallest circuit that does what the model does, and test it on other examples."
        ),
        "heads": ("Ablate every head alone, each layer's heads together, all heads, and groups of your own."),
        "patch": "Put activations from a source into a run, and see which metrics move.",
        "permute": "Permute the position embeddings, many times, and see which metrics move.",
        "transplant": "Give a model some weights of another checkpoint, and see which metrics move.",
    },
    "matrix": {
        "algorithm": (
            "Ask which known method fills in the blanks as the model does: agreement of predictions and of "
            "errors."
        ),
        "baseline": (
            "Compare models with methods that are not trained, such as completions of least nuclear norm."
        ),
        "copying": "Put another token at hidden entries, and see whether the output there copies it.",
        "decoding": (
            "See what a language model of a task answers when it goes on from its own answers (greedy "
            "decoding)."
        ),
        "embeddings": (
            "See how token embeddings follow the values they stand for, and position embeddings the grid."
        ),
        "influence": "See which observed entries move which hidden ones: change one at a time.",
        "ood": (
            "Try models on other laws of the entries, ranks, numbers of rows and columns than they were "
            "trained on."
        ),
        "order": (
            "See which quantity moves first over the checkpoints of a run, and how long before the drop."
        ),
    },
    "modular": {
        "detector": (
            "Read the remainders of a number together, and call it prime where none is 0: precision and "
            "recall."
        ),
        "generalisation": (
            "Say at which step each accuracy of a run reaches a level, in training and validation, in which "
            "order."
        ),
        "gradients": (
            "Say when the gradient of each weight becomes small, before and after the filter; attention "
            "beside the rest."
        ),
        "neurons": (
            "See neurons, or heads' attention to each digit, as images over all inputs, with what explains "
            "their variance."
        ),
        "prime-order": (
            "See what the order in which primes generalise follows: q, whether q divides p − 1, or p mod q."
        ),
        "primes": (
            "Say which parts of a model belong to which modular answer, and how far answers share them."
        ),
        "progress": (
            "See how far a model of modular arithmetic has come: Nanda et al.'s progress measures, for each "
            "answer."
        ),
        "weights": (
            "See embeddings as tables: similar positions, singular values and vectors, frequencies over the "
            "digits."
        ),
    },
}

#: Name -> module and function in this folder; the others are experiments, whose functions are their commands.
FUNCTIONS = {
    "train": "train:train",
    "grid": "grid:grid",
    "list": "tasks:list_tasks",
    "cost": "tasks:cost",
    "data": "tasks:data",
    "checkpoints": "runs:checkpoints",
    "import": "runs:import_weights",
    "report": "runs:report",
    "search": "search:search",
    "zoo": "zoo:zoo",
    "reproduce": "reproduce:reproduce",
    "demo": "demo:demo",
}
