# %% [markdown]
# # Modular addition: key frequencies, restricted and excluded loss
#
# A one-layer transformer learns a + b mod 113 from a part of all pairs. It memorises them, and much later generalises,
# abruptly. Nanda et al. 2023 found how: numbers become angles at a few *key frequencies*, and logits are cosines of
# a + b − c. We watch it happen.
#
# The model ships with the package: `pip install .`, and this notebook runs in a minute, offline. Built from
# `modular-addition.py` by `build.py`; figures are interactive in JupyterLab, pictures elsewhere.

# %%
import plotly.express as px
import torch

from circuits import SweepResult, ablate, fourier, plots, run, sweep
from interp_tasks import experiments, load_checkpoint, load_checkpoints

RUN = "zoo:modular-addition-113"
after = load_checkpoint(f"{RUN}@post")
model, task, p = after.model, after.task, after.task.p
everything = task.input_grid()
print(f"{len(everything):,} inputs: a, b, '='")

# %% [markdown]
# ## Grokking
#
# The accuracy on pairs that training never showed, by step.

# %%
experiments.drops(RUN).plot()

# %% [markdown]
# ## Ablate, before and after
#
# With attention spread evenly over a and b, the grokked model still answers two thirds: much of what the heads do is to
# bring both numbers together. Without the MLP next to nothing is left.

# %%
batch = task.sample(512, seed=0)
variants = {"uniform over a, b": ablate.uniform("all", keys=[0, 1]), "no MLP": ablate.zero("mlp_out.0")}
models = {"before": load_checkpoint(f"{RUN}@pre").model, "after": model}
result = SweepResult.concat(
    {
        label: sweep(one, batch.tokens, variants, metric=task.metrics, batch=batch)
        for label, one in models.items()
    }
)
result.plot("accuracy")

# %% [markdown]
# ## Key frequencies
#
# W_L = W_out·W_U says what each neuron adds to each logit. As a function of the answer it is made of four frequencies.

# %%
spectrum = fourier.spectrum(model.blocks[0].mlp.W_out @ model.W_U, axis=1)
keys = list(fourier.key_frequencies(spectrum, "of-largest"))
print("key frequencies", *keys)
plots.spectrum(spectrum, keys, title="W_L over the classes c")

# %% [markdown]
# The logits themselves are cosines of a + b − c at these frequencies:

# %%
answer = fourier.ModularSum(everything.tokens[:, :2], (1, 1), p)
logits = run(model, everything.tokens)[:, 2]
fit = answer.cosines(logits)
print(f"{fit.explained(keys):.0%} of the variance of the logits")
named = {"x": "frequency", "y": "coefficient (logits)"}
title = "Logits as cosines of a + b − c"
px.bar(x=range(1, p // 2 + 1), y=fit.coefficients[1:].tolist(), labels=named, title=title)

# %% [markdown]
# ## Restricted and excluded loss
#
# *Restricted*: only the waves of the key frequencies are kept in the logits. *Excluded*: only they are taken away. The
# restricted loss falls long before that of all logits: the circuit forms gradually, under a plateau.


# %%
def loss(values):
    """Cross-entropy over all inputs, in nats."""
    return torch.nn.functional.cross_entropy(values.double(), answer.remainders).item()


steps, measured = [], {"all logits": [], "restricted": [], "excluded": []}
for checkpoint in load_checkpoints(f"{RUN}@all"):
    logits = run(checkpoint.model, everything.tokens)[:, 2]
    steps.append(checkpoint.step)
    measured["all logits"].append(loss(logits))
    measured["restricted"].append(loss(answer.restricted(logits, keys)))
    measured["excluded"].append(loss(answer.excluded(logits, keys)))
plots.curve(
    {name: (steps, values) for name, values in measured.items()},
    log_y=True,
    title="Progress measures over training",
    x_title="step",
    y_title="loss over all inputs (nats)",
)

# %% [markdown]
# On: the whole argument, [reverse-engineered step by step](../tutorials/modular-addition.md), and the [progress
# measures](../modular-arithmetic.md#is-the-answer-made-of-fourier-components-and-since-when) over seeds.
