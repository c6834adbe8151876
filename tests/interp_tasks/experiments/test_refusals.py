"""What experiments refuse, each in one line, beside what the command line does: calls and what is said of them."""

import numpy as np
import pytest
import torch

import tasks
from interp_tasks import experiments as e
from interp_tasks.checkpoints import save_checkpoint

TOKENS = np.ones((8, 9), dtype=int)
NOWHERE = "zoo:nowhere"
SMALL = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)

#: Experiment, what it looks at, options, a pattern of the message.
REFUSED = [
    ("ablation", "matrix", {"heads": []}, "no heads given"),
    ("ablation", "matrix", {"mode": "noise", "scale": 0}, "its standard deviation above 0"),
    ("attention", "modular", {"mask": "rows"}, "not hidden by a mask"),
    ("attention", "matrix", {"mask": "diagonal"}, "mask 'diagonal': write rows, columns, or 3 rows of 3"),
    ("circuit", "matrix", {"method": "best"}, "--method 'best': choose gradient, integrated, gim or exact"),
    ("circuit", "matrix", {"faithfulness": 1.5}, "--faithfulness 1.5: above 0 and at most 1"),
    ("circuit", "matrix", {"samples": 3}, "3 examples: one half finds the circuit"),
    ("circuit", "matrix", {"source": "shifted"}, "--source shifted: .* write a REF, or one of mask, values"),
    ("circuit", "matrix", {"metric": "accuracy"}, "choose mse_all, mse_masked or mse_observed$"),
    ("circuit", "matrix", {"keep": "nowhere.json"}, "nowhere.json"),
    ("circuit", "matrix", {"spans": "a"}, "--spans a '': write positions counted from 0"),
    ("circuit", "matrix", {"spans": "a=1", "kind": "nodes"}, "leave out --kind nodes"),
    ("circuit", "matrix", {"spans": "a=1;a=2"}, "each span has a name of its own"),
    ("circuit", "matrix", {"rank_by": "loss"}, "no argument 'rank_by'; there are samples, seed"),
    ("circuit", "matrix", {"tokens": TOKENS, "metric": "mse_all"}, "tokens of your own have no task with metrics"),
    ("fourier", "modular", {"rule": "noise=much"}, "after = comes a number from 0, such as noise=0.05"),
    ("fourier", "matrix", {}, "fourier needs a task with a grid of inputs"),
    ("heads", "matrix", {"least": 2}, "--least 2: a number of heads, which --by-class"),
    ("heads", "matrix", {"by_class": True, "tokens": TOKENS}, "--by-class finds classes on other examples"),
    ("heads", "matrix", {"groups": {"a": "0.0"}, "random_size": 3}, "--random-size 3: .*goes with --random"),
    ("heads", "matrix", {"groups": {"a": "0.0"}, "random": 2, "random_size": 4}, "has 4 heads"),
    ("patch", "matrix", {"source": "resample", "tokens": TOKENS, "by_class": True}, "give a task"),
    ("patch", "matrix", {"source": "resample", "samples": 1}, "at least 2 examples"),
    ("probe", "matrix", {"targets": "rows"}, "rows"),
    ("probe", "matrix", {"held_out": 1.5}, "--held-out 1.5: give a fraction"),
    ("probe", "matrix", {"tokens": TOKENS}, "probe takes no tokens: leave it out"),
    ("transplant", "matrix", {"source": ""}, "an empty checkpoint reference"),
    ("patch", "matrix", {"source": "resample", "site": "z.1", "heads": "0.1"}, "0.1"),
    ("embeddings", "matrix", {"largest": 0.0}, "above 0"),
    ("influence", "matrix", {"task": SMALL.model_copy(update={"p_mask": 0.0})}, "both an entry to change and one to"),
    ("influence", "modular", {}, "does not say what may be changed"),
    ("decoding", "matrix", {}, "declares no decoded"),
    ("copying", "modular", {}, "declares no copying_inputs"),
    ("algorithm", "matrix", {"methods": "mean"}, "--method 'mean'"),
    ("algorithm", "modular", {}, "declares no methods"),
    ("embeddings", "modular", {}, "neither tokens with values nor positions on a grid"),
    ("ood", "matrix", {"vary": "colour"}, "--vary 'colour'"),
    ("order", "matrix", {}, "1 checkpoints; order needs at least 4"),
    ("neurons", "modular", {"neurons": [12]}, "has neurons 0-11"),
    ("neurons", "matrix", {}, "neurons needs a task with a grid of inputs of 2 coordinates"),
    ("primes", "constant", {}, "the same for every input: no variance to share out"),
    ("detector", "modular", {"samples": 5}, "detector takes no samples"),
    ("weights", "modular", {"control": NOWHERE}, "nowhere"),
    ("progress", "modular", {"train": [0, 49]}, "indices 0 to 48 of the grid's inputs, or a mask of all 49"),
    ("drops", "zoo:matrix-completion-4x4", {"against": "d_model"}, "a setting such as model.d_model"),
    ("drops", "zoo:matrix-completion-4x4", {"metric": "accuracy"}, "accuracy"),
    ("generalisation", "zoo:matrix-completion-4x4", {}, "logs no finite accuracy: it has"),
    ("generalisation", "zoo:modular-addition-113", {"level": 1.5}, "an accuracy above 0, at most 1"),
    ("gradients", "zoo:modular-addition-113", {}, "train with --set train.gradient_norms_every=100"),
    ("gradients", "zoo:miiii-113-paper", {"start": -1}, "--start -1: a step from 0"),
    ("prime_order", "zoo:modular-addition-113", {}, "prime-order is of the task miiii"),
    ("data", 3, {}, "give the name of a task, or a task"),
    ("data", "miiii", {"config": {"p": 12}}, "p must be prime"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refs(folders, tmp_path_factory):
    """Checkpoints of small models by name."""
    root = tmp_path_factory.mktemp("refused")
    found = {"matrix": folders[0]}
    for name, task in (
        ("modular", tasks.get("miiii", p=7, primes=[2, 3, 5])),
        ("addition", tasks.get("modular-addition", p=7)),
        ("constant", tasks.get("modular-addition", p=5)),
    ):
        model = task.build_model(0, task.Model(d_model=8, n_heads=2, d_mlp=12))
        if name == "constant":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        found[name] = str(save_checkpoint(root / name, model, task, step=1))
    return found


@pytest.mark.parametrize(("experiment", "of", "options", "message"), REFUSED)
def test_what_is_refused_and_how(refs, experiment, of, options, message):
    with pytest.raises(ValueError, match=message) as refused:
        getattr(e, experiment)(refs.get(of, of), **options)
    assert "\n" not in str(refused.value)
