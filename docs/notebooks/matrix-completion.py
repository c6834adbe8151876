# %% [markdown]
# # Matrix completion: a drop, and what carries it
#
# A small transformer sees a 7×7 matrix of rank 2 with some entries hidden, and says them all. For a while it only
# copies what it sees; then it begins to fill in what is hidden (Gopalani, Lubana, Hu 2024). We watch the drop, take
# attention away before and after it, read activations by linear probes, and look at what the heads attend to.
#
# The model ships with the package: `pip install .`, and this notebook runs in a minute, offline. Built from
# `matrix-completion.py` by `build.py`; figures are interactive in JupyterLab, pictures elsewhere.

# %%
from circuits import SweepResult, ablate, heads, patterns, plots, sweep
from interp_tasks import experiments, load_checkpoint

before = load_checkpoint("zoo:matrix-completion-7x7@pre")
after = load_checkpoint("zoo:matrix-completion-7x7@post")
task, batch = after.task, after.task.sample(128, seed=0)
print(
    f"steps {before.step:,} and {after.step:,}; {len(batch)} test matrices of {batch.tokens.shape[1]} entries"
)

# %% [markdown]
# ## The drop
#
# The mean squared error on hidden entries stays at that of guessing 0, and then falls. Bold is the drop, from where 10%
# of the way is made to where 90% is.

# %%
experiments.drops("zoo:matrix-completion-7x7").plot()

# %% [markdown]
# ## Uniform attention, before and after
#
# Each head's attention is replaced by equal attention to every entry, one head at a time. Before the drop no head
# matters for hidden entries; after it 1.3 does most, and 0.6, and most others little by themselves.

# %%
models = {"before": before.model, "after": after.model}


def at_both(variants):
    """Returns the table of the variants at both checkpoints."""
    return SweepResult.concat(
        {
            label: sweep(model, batch.tokens, variants, metric=task.metrics, batch=batch)
            for label, model in models.items()
        }
    )


result = at_both(ablate.each(ablate.uniform, heads("all", after.model)))
plots.heads(result, "mse_masked", title="Effect of uniform attention on the error at hidden entries")

# %% [markdown]
# All heads together: what the drop gained is lost.

# %%
every = at_both({"all heads": ablate.uniform("all"), "layer 0": ablate.uniform("0.0-7")})
every.plot("mse_masked")

# %%
columns = ["checkpoint", "variant", "baseline", "value", "effect", "effect_ci_low", "effect_ci_high"]
every.frame[every.frame["metric"] == "mse_masked"][columns].round(3)

# %% [markdown]
# ## Probes
#
# Can the entry itself be read off the residual stream by a linear map? Where it is observed, in every layer; where it
# is hidden, better with each layer. Dotted: targets exchanged between examples.

# %%
experiments.probe(
    "zoo:matrix-completion-7x7@post", targets=["true_element"], samples=128, untrained=False
).plot()

# %% [markdown]
# ## What heads attend to
#
# Mean attention over the matrices; entries are numbered row by row. In layer 0 heads 6 and 7 look along rows, 1 and 5
# along columns; later layers have more of both.

# %%
maps = patterns.attention(after.model, batch.tokens)
maps.plot(titles={(0, 7): "head 0.7: rows", (0, 5): "head 0.5: columns"})

# %%
templates = {
    "row": patterns.row(7, 7, itself=False),
    "column": patterns.column(7, 7, itself=False),
    "itself": patterns.identity(49),
}
scores = patterns.scores(after.model, batch.tokens, templates)
scores.plot("corrected")

# %% [markdown]
# On: [attention heads](../matrix-completion.md#attention-heads), [training
# dynamics](../matrix-completion.md#where-is-the-plateau-and-when-does-it-end), and what `circuits` can do with
# [a model of your own](../circuits/index.md).
