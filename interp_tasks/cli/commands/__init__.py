"""Lists the commands, so that help need import none of them.

A new experiment has a line in ``COMMANDS``, which its help begins with; another command in ``FUNCTIONS``, too.
"""

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
        "import": "Make a run of weights trained elsewhere: a HookedTransformer's, a Hugging Face folder.",
        "report": "Show a run on one page: its curve and drop, its heads at each checkpoint.",
        "search": "Search hyper-parameters with Optuna: a training run for every trial.",
        "zoo": "List the trained models that ship.",
        "curve": "Put plateau, drop and final level of runs beside theory, and answers beside errors.",
        "llc": "Estimate the local learning coefficient of checkpoints, beside their losses.",
        "drops": "Say whether each run drops, when, how sharply, from what level to what level.",
    },
    "Papers": {
        "reproduce": "A paper's claims: published numbers beside ours, and a verdict on each.",
        "demo": "Ablate attention in shipped models before and after they learn abruptly: 20 seconds.",
    },
    "Look": {
        "attention": "See what each head attends to: scores against templates, classes, mean maps.",
        "fourier": "Say which frequencies embeddings and neurons are made of, over the task's grid of inputs.",
        "lens": "Read the residual stream out after each layer, and without each component.",
        "probe": "Fit linear probes from activations to what the task declares.",
    },
    "Intervene": {
        "ablation": "Ablate attention heads, by default with uniform attention, and see which metrics move.",
        "circuit": "Find the smallest circuit that does what the model does, and test it on other examples.",
        "heads": "Ablate every head alone, each layer's heads together, all heads, and groups of your own.",
        "patch": "Put activations from a source into a run, and see which metrics move.",
        "permute": "Permute the position embeddings, many times, and see which metrics move.",
        "transplant": "Give a model some weights of another checkpoint, and see which metrics move.",
    },
    "matrix": {
        "algorithm": "Ask which known method fills in the blanks as the model does.",
        "baseline": "Compare models with methods that are not trained, such as least nuclear norm.",
        "copying": "Put another token at hidden entries, and see whether the output there copies it.",
        "decoding": "See what a language model of a task answers when it goes on from its own answers.",
        "embeddings": "See how token embeddings follow their values, and position embeddings the grid.",
        "influence": "See which observed entries move which hidden ones: change one at a time.",
        "ood": "Try models on other laws of the entries, ranks, numbers of rows and columns.",
        "order": "See which quantity moves first over a run's checkpoints, and how long before the drop.",
    },
    "modular": {
        "detector": "Read the remainders of a number together, and call it prime where none is 0.",
        "generalisation": "Say at which step each accuracy of a run reaches a level, and in which order.",
        "gradients": "Say when the gradient of each weight becomes small, before and after the filter.",
        "neurons": "See neurons, or attention to each digit, as images over all inputs.",
        "prime-order": "See what the order in which primes generalise follows.",
        "primes": "Say which parts of a model belong to which modular answer, and how far they are shared.",
        "progress": "See how far a model of modular arithmetic has come: Nanda et al.'s progress measures.",
        "weights": "See embeddings as tables: similar positions, singular values, frequencies over digits.",
    },
}

#: Name -> module and function in this folder; the others are experiments, whose functions are their commands.
FUNCTIONS = {
    "train": "train_and_search:train",
    "grid": "grid:grid",
    "list": "tasks:list_tasks",
    "cost": "tasks:cost",
    "data": "tasks:data",
    "checkpoints": "runs:checkpoints",
    "import": "runs:import_weights",
    "report": "runs:report",
    "search": "train_and_search:search",
    "zoo": "runs:zoo",
    "reproduce": "reproduce:reproduce",
    "demo": "demo:demo",
}
