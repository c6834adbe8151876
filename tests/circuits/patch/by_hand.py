"""Metrics, forwards by hand and derivatives along paths, which estimates of nodes and of edges are compared with."""

import re
from functools import partial

import torch

from circuits import patch
from tests.circuits.conftest import activations

WEIGHT = torch.randn(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
FEW = {"draws": 20, "flips": 20}
ONE = {**FEW, "exact": 1}

# The plain gradient, where a test does not ask for another method.
nodes, edges = (partial(one, method="gradient") for one in (patch.screen, patch.edges))


def weighed(output):
    """Linear in the output; every position and class counts."""
    return (output * WEIGHT[:, : output.shape[-1]]).sum((1, 2))


def curved(output):
    return (output.log_softmax(-1) * WEIGHT).sum((1, 2))


def on_the_way(by_hand, model, base, source, fraction):
    """What puts the embeddings a fraction of the way from base to source."""
    (ours, _), (theirs, _) = (activations(by_hand, model, tokens) for tokens in (base, source))
    embed = ours["embed", None] + fraction * (theirs["embed", None] - ours["embed", None])
    return lambda s, at, x: embed if s == "embed" else x


def midpoints(steps):
    return [(step + 0.5) / steps for step in range(steps)]


def by_name(result, metric=None, column="estimate"):
    frame = result.frame if metric is None else result.frame[result.frame["metric"] == metric]
    return dict(zip(frame["variant"], frame[column], strict=True))


def assert_equal(found, expected, tolerance=1e-9):
    assert expected
    assert set(found) == set(expected)
    largest = max(map(abs, expected.values()))
    assert largest > 0.01
    for name, value in expected.items():
        assert abs(found[name] - value) <= tolerance * largest, name


def path_of(name, source):
    """The `patch.path` of an edge's name."""
    sender, receiver = name.split(" -> ")
    head, _, site = receiver.partition(" ")[0].rpartition(".")
    return patch.path(sender, (site, head) if head[:1].isdigit() else receiver, source)


def end_of(name):
    """(site, layer), head."""
    if match := re.fullmatch(r"(\d)\.(\d)(?:\.(\w))?", name):
        return (match[3] or "z", int(match[1])), int(match[2])
    site, _, layer = name.partition(".")
    return (site, int(layer) if layer else None), None


def path_slope(by_hand, model, base, source, name, metric, around=lambda s, at, x: x):
    """The derivative of the metric [batch] as the sender starts from its value towards `source`, in three passes."""
    forward, (sender, receiver) = by_hand.__wrapped__, map(end_of, name.split(" -> "))
    if receiver[0][0] == "output":
        receiver = ("resid_post", model.cfg.n_layers - 1), None
    (ours, _), (theirs, _) = (activations(by_hand, model, tokens) for tokens in (base, source))
    clean, _ = activations(by_hand, model, base, around)
    size = torch.zeros(len(base), dtype=torch.float64, requires_grad=True)

    def only(x, end, new):
        chosen = torch.zeros_like(x)
        chosen[(slice(None), slice(None), *([] if end[1] is None else [end[1]]))] = 1
        return x + chosen * (new - x)

    def send(s, at, x):
        x = clean[s, at] if s in ("z", "mlp_out") else around(s, at, x)
        if (s, at) != sender[0]:
            return x
        along = size.reshape(-1, *[1] * (x.ndim - 1)) * (theirs[s, at] - ours[s, at])
        return only(x, sender, x + along)

    received, _ = activations(forward, model, base, send)

    def receive(s, at, x):
        return only(x, receiver, received[s, at]) if (s, at) == receiver[0] else around(s, at, x)

    (slope,) = torch.autograd.grad(metric(forward(model, base, receive)).sum(), size)
    return slope
