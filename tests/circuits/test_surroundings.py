"""Verbs amid what a user has around them: hooks, padding, frozen or shared weights, train mode, blocks, refused runs.

Each number is that of a forward by hand in which the user's hooks are on, too, or the verb refuses as `refusal` says;
then the model is what it was, and runs as before.
"""

import random
from contextlib import ExitStack, suppress
from functools import cached_property, partial

import pytest
import torch
from torch import nn

from circuits import CircuitsError, circuit, edit, intervene, lens, patch, patterns, prompts, run, sweep
from circuits.ablate import zero
from circuits.model.activation_recording import hold_eval_mode
from circuits.model.sites import KINDS as SITES
from circuits.probe import linear
from circuits.sweeps.logit_difference import logit_difference
from circuits.sweeps.sweep import compare
from circuits.transplant import weights as transplanted
from tests.circuits import conftest as models
from tests.circuits.conftest import BRIDGE, HOOKED, activations, forward, weights_of
from tests.circuits.test_properties import differences, footprint

NAMES = ("causal", "bidirectional", "llama", "parallel", "every hook on", "post-norm, causal, every hook on")
KINDS = [kind for kind in models.KINDS_OF_MODELS if kind[0] in NAMES]
ATTENTION, COMPONENTS = ("scores", "pattern"), ("embed", "q", "v", "z", "mlp_post", "mlp_out")
#: What passes through hook points of a bridge, whichever TransformerLens made it.
IN_LINE = (*COMPONENTS, "k", "attn_out", "resid_pre", "resid_post")
ROWS = LAYERS = (0, 1)
RIGHT, WRONG = 2, 1  # the answers that the metric compares
FEW = {"draws": 2, "flips": 2}

#: Random models tell clean from source by chance.
pytestmark = pytest.mark.filterwarnings("ignore:circuit.*the gap between clean and source run is")


class Scene:
    """A model with what a user has on it, two prompts, and their forward by hand."""

    def __init__(self, kind, seed, even):
        changes = {"n_ctx": 9, "attention_dir": "causal", **(models.SHAPES | models.FEATURES)[kind[0]]}
        self.chance, self.bridged, self.post_norm = random.Random(seed), kind[1] == BRIDGE, "norm" in changes
        self.model = models.build(family=kind[1], **changes)
        self.even = even or self.post_norm or changes["attention_dir"] != "causal"
        self.last = ("resid_post", self.model.cfg.n_layers - 1)
        made, lengths = torch.Generator().manual_seed(seed), (5, 5) if self.even else (3, 5)
        self.rows, self.others = ([torch.randint(0, 7, (n,), generator=made) for n in lengths] for _ in ROWS)
        sides = ("left", "right") if seed % 2 == 0 else ("right", "left")
        self.base, self.source = map(prompts, [self.model] * 2, (self.rows, self.others), sides)
        self.position = self.chance.choice([-1, 1])
        self.metric = logit_difference(RIGHT, WRONG, position=self.position)
        self.given = self.model, self.base, self.source, self.metric
        self.hooks, self.block, self.inside = {}, [], []
        self.shares_memory, self.for_now = False, ExitStack()

    def surround(self, what):
        """Puts something of a user's on the model, if the model has a place for it."""
        model, points, kind = self.model, self.model.hook_dict, what.removeprefix("a hook on ")
        there = [site for site, one in SITES.items() if one.hook.format(0) in points and site != "pos_embed"]
        mlp_in = ["mlp_in"] * getattr(model.cfg, "use_hook_mlp_in", False)
        sites = {"a component": COMPONENTS, "the logits": ["logits"], "the MLP's input": mlp_in}
        sites["a site"] = IN_LINE if self.bridged else there
        if sites.get(kind):
            self.hook(*sites[kind])
        elif what == "a refused run inside":
            points["blocks.1.attn.hook_q"].register_forward_hook(self.run_inside)
        elif what == "dropout in train mode":
            model.train().dropped = dropout = nn.Dropout(0.5)
            points["blocks.0.attn.hook_z"].register_forward_hook(lambda module, given, x: dropout(x))
        elif what == "frozen weights and gradients":
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight)
                weight.requires_grad_(self.chance.random() < 0.3)
        elif what == "weights that share memory" and not self.bridged:
            memory = torch.randn(264, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            model.embed.W_E = nn.Parameter(memory[:176].view(11, 16))
            model.unembed.W_U = nn.Parameter(memory[88:].view(16, 11)[:, : model.unembed.W_U.shape[1]])
            self.shares_memory = True
        elif what == "a block":
            self.block = [(("v", 0), lambda row, x: first(x, 2 * x))]

    def hook(self, *sites):
        """Puts a hook of the user's at one of the sites, in one of the ways there are."""
        choice = self.chance.choice
        site, way = choice(sites), choice(["raw", "in place", "add", "keep", "for now"])
        layer = None if site in ("embed", "logits") else 1 if site == "mlp_in" else choice(LAYERS)
        name = f"blocks.{layer}.hook_mlp_in" if site == "mlp_in" else choice(["", "unembed"])
        name = SITES[site].hook.format(layer) if site in SITES else name
        of_positions = ["summed"] if site == "logits" else ["bent", "at the end"]
        f = CHANGES[choice(["scaled"] if site in ATTENTION else of_positions if self.even else ["bent"])]
        if way == "raw" or site == "logits":
            self.model.get_submodule(name).register_forward_hook(lambda module, given, x: f(x))
        elif way == "in place" and site not in ("pattern", "mlp_post"):  # whose value autograd keeps
            self.model.hook_dict[name].register_forward_hook(lambda module, given, x: x.copy_(f(x.clone())))
        elif way == "for now":
            self.for_now.enter_context(self.model.hooks(fwd_hooks=[(name, lambda x, hook: f(x))]))
        else:
            self.model.add_hook(name, lambda x, hook: f(x), is_permanent=way == "keep")
        self.hooks.setdefault((site, layer), []).append(f)

    def run_inside(self, *_):
        """Runs the model as a hook on it, and goes on where that is refused."""
        if not self.inside:
            self.inside.append(True)
            with suppress(CircuitsError), torch.no_grad():
                self.model(torch.stack([row[:3] for row in self.others]))
            self.inside.clear()

    def by_hand(self, row, *edits, of=None, blind=False, graph=False):
        """The logits [pos out] of one prompt alone, and all activations [1 pos ...], under hooks and edits; of other
        prompts than base's, blind to the block around, or with a graph.
        """

        def at(site, layer, x):
            for f in self.hooks.get((site, layer), ()):
                x = f(x)
            for where, new in (*([] if blind else self.block), *edits):
                x = new(row, x) if where == (site, layer) else x
            return x

        plain, tokens = (forward.__wrapped__ if graph else forward), (of or self.rows)[row][None]
        seen, output = activations(plain, self.model, tokens, at)
        return at("logits", None, output)[0], seen

    @cached_property
    def theirs(self):
        """The source's activations, which no block of ours edits."""
        return [self.by_hand(row, of=self.others, blind=True)[1] for row in ROWS]

    @cached_property
    def clean(self):
        return [self.by_hand(row)[1] for row in ROWS]

    def mean(self, *edits, **given):
        """The metric by hand."""
        outputs = (self.by_hand(row, *edits, **given)[0][self.position] for row in ROWS)
        return sum(x[RIGHT] - x[WRONG] for x in outputs) / len(ROWS)

    def own(self, x, row, *axes):
        """What a prompt's own tokens have in a batch, along axes of positions that are counted in one prompt."""
        for axis in axes or (0,):
            x = x.index_select(axis + 1, self.base.real[row].nonzero().flatten())
        return x[row]


#: What hooks do to x [batch pos ...]; the last two are of positions, and of prompts of one length.
CHANGES = {
    "bent": lambda x: 2 * x.tanh() + 0.3,
    "scaled": lambda x: 0.6 * x,
    "at the end": lambda x: torch.cat([x[:, :-1], 10 * x[:, -1:]], 1),
    "summed": lambda x: x.cumsum(1),
}


def first(x, new):
    """x [batch pos ...] with another first position."""
    return torch.cat([new[:, :1], x[:, 1:]], 1)


def head(number, x, new):
    """x [batch pos head ...] with another head."""
    return x.index_copy(2, torch.tensor([number]), new[:, :, [number]])


def numbers(*given):
    return torch.tensor([float(one) for one in given], dtype=torch.float64)


# ---- Verbs. Each yields numbers and what they are by hand.


def edits_of(scene):
    """Edits at some positions, and what they are by hand."""
    theirs, first_alone = scene.theirs, {"positions": [0]}
    stored = scene.source if scene.block else run(scene.model, scene.source, cache="mlp_out.1")[1]
    made = (
        patch.activations("z.1", scene.source, **first_alone),
        patch.activations("mlp_out.1", stored),
        edit("q.1", lambda x: x + 1, positions=[-1]),
        zero("0.1", **first_alone),
    )
    by_hand = [
        (("z", 1), lambda row, x: first(x, theirs[row]["z", 1])),
        (("mlp_out", 1), lambda row, x: theirs[row]["mlp_out", 1]),
        (("q", 1), lambda row, x: torch.cat([x[:, :-1], x[:, -1:] + 1], 1)),
        (("z", 0), lambda row, x: first(x, head(1, x, 0 * x))),
    ]
    return made, by_hand


def runs(scene):
    """And a comparison of their outputs, by a metric that runs the model."""
    made, by_hand = edits_of(scene)
    output, seen = run(scene.model, scene.base, *made, cache=["z.1", "pattern.1"])
    assert torch.equal(output.isnan().any(-1), ~scene.base.real)
    for row in ROWS:
        expected, at = scene.by_hand(row, *by_hand)
        yield scene.own(output, row), expected
        yield scene.own(seen["z.1"], row), at["z", 1][0]
        yield scene.own(seen["pattern.1"], row, 1, 2), at["pattern", 1][0]

    def metric(output):
        with hold_eval_mode(scene.model), torch.no_grad():
            return output[:, 0, RIGHT] - scene.model(scene.others[0][None])[0, -1, RIGHT]

    ends = [scene.base.last(x)[:, None] for x in (run(scene.model, scene.base), output)]
    frame = compare([(ends[0], {"edited": ends[1]})], metric, **FEW).frame
    values = [scene.by_hand(row, *edits)[0][-1, RIGHT] for edits in ((), by_hand) for row in ROWS]
    expected = torch.stack(values).view(2, 2).mean(1) - scene.by_hand(0, of=scene.others)[0][-1, RIGHT]
    yield numbers(frame["baseline"][0], frame["value"][0]), expected


def sweeps(scene):
    made, by_hand = edits_of(scene)
    expected = numbers(scene.mean(), *map(scene.mean, by_hand))
    variants = {one.label: one for one in made}
    for options in ({}, {"engine": "naive", "batch_size": 1}):
        frame = sweep(scene.model, scene.base, variants, scene.metric, **options, **FEW).frame
        yield numbers(frame["baseline"][0], *frame["value"]), expected


def lenses(scene):
    made, by_hand = edits_of(scene)
    found, weights = lens(scene.model, scene.base, *made, batch_size=1), weights_of(scene.model)
    shares = lens(scene.model, scene.base, scene.metric, *made).shares
    for row in ROWS:
        output, at = scene.by_hand(row, *by_hand)
        yield scene.own(found.output, row), output
        for layer in () if scene.post_norm else LAYERS:
            # The stream after a layer takes the place of the last.
            early = {scene.last: at["resid_post", layer]}
            read = forward(scene.model, scene.rows[row][None], lambda s, at, x, e=early: e.get((s, at), x))
            yield scene.own(found.readouts[f"layer {layer}"], row), read[0]
            stream, part = at[scene.last], at["z", layer][:, :, 2] @ weights[f"blocks.{layer}.attn.W_O"][2]
            if scene.model.cfg.normalization_type == "LN":
                part, stream = (x - x.mean(-1, keepdim=True) for x in (part, stream))
            if scene.model.cfg.normalization_type:
                scale = (stream.square().mean(-1, keepdim=True) + scene.model.cfg.eps).sqrt()
                part = part / scale * weights["ln_final.w"]
            direct = (part @ weights["unembed.W_U"])[0]
            yield scene.own(found.contributions[f"{layer}.2"], row), direct
            yield shares[f"{layer}.2"][row], direct[scene.position, RIGHT] - direct[scene.position, WRONG]


def attributions(scene):
    sites = {"z": (0, 1, 3), "q": (0, 1, 3), "pattern": (0, 2, 3), "scores": (0, 2, 3)}
    sites |= dict.fromkeys(("embed", "resid_pre", "mlp_post"), (0, 2))
    for site in scene.chance.sample([*sites], 3):
        frame = patch.attribution(*scene.given, site, **FEW).frame
        for layer in LAYERS if site != "embed" else [None]:
            leaves = []

            def leaf(row, x, leaves=leaves):
                leaves.append(x.detach().requires_grad_())
                return leaves[-1].clone()

            with torch.enable_grad():
                slopes = torch.autograd.grad(scene.mean(((site, layer), leaf), graph=True), leaves)
            expected = torch.zeros(4 if len(sites[site]) == 3 else 5, dtype=torch.float64)
            for theirs, ours, slope in zip(scene.theirs, leaves, slopes, strict=True):
                change = (theirs[site, layer] - ours).detach().nan_to_num()  # of masked scores
                estimate = (change * slope).sum(sites[site])
                expected[: len(estimate)] += estimate
            effects = frame["effect"] if layer is None else frame["effect"][frame["layer"] == layer]
            yield numbers(*effects), expected


#: By sender, receiver as `patch.path` names it, as circuits do, where it is by hand, and its head there.
PATHS = (
    ("0.1", ("q", "1.2"), "1.2.q", ("q", 1), 2),
    ("0.1", "mlp_pre.1", "mlp1", ("mlp_in", 1), None),
    ("embed", "output", "output", ("resid_post", -1), None),
)


def along(scene, sender, receiver, number, share=1.0, frozen=("z", "mlp_out")):
    """What a receiver, or a head of it, gets as the sender goes to the source's by a share, and all else is frozen."""
    theirs, sent = scene.theirs, ("z", 0) if sender == "0.1" else ("embed", None)
    receiver = scene.last if receiver[1] == -1 else receiver

    def received(row, x):
        clean = scene.clean[row]
        stay = [(at, lambda row, x, at=at: clean[at]) for at in clean if at[0] in frozen]
        new = clean[sent] + share * (theirs[row][sent] - clean[sent])
        moved = sent, lambda row, x: head(1, x, new) if sender == "0.1" else new
        found = scene.by_hand(row, *stay, moved, graph=isinstance(share, torch.Tensor))[1][receiver]
        return found if number is None else head(number, x, found)

    return receiver, received


def paths(scene):
    """Of a head's output, also through the MLPs behind it."""
    for (sender, receiver, _, *end), through in ((path, way) for path in PATHS for way in (None, "mlps")):
        output = run(scene.model, scene.base, patch.path(sender, receiver, scene.source, through))
        by_hand = along(scene, sender, *end, frozen=("z",) if through else ("z", "mlp_out"))
        for row in ROWS:
            yield scene.own(output, row), scene.by_hand(row, by_hand)[0]


def edges(scene):
    estimates = patch.edges(*scene.given, steps=0, exact=0, **FEW).frame.set_index("variant")["estimate"]
    share = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for sender, receiver, name, *end in PATHS:
        with torch.enable_grad():
            value = scene.mean(along(scene, sender, *end, share), graph=True)
        (expected,) = torch.autograd.grad(value, share)
        yield numbers(estimates[f"{sender} -> {receiver if name == 'mlp1' else name}"]), numbers(expected)


def circuits(scene):
    """All but one node, or one edge."""
    (model, base, source, metric), whole, theirs = scene.given, circuit.full(scene.model), scene.theirs
    nodes = circuit.full(model, "nodes") - circuit.nodes(["0.1"])
    others = {name: whole - circuit.edges([f"{sender} -> {name}"]) for sender, _, name, *_ in PATHS}
    expected = [scene.mean((("z", 0), lambda row, x: head(1, x, theirs[row]["z", 0])))]
    expected += [scene.mean(along(scene, sender, *end)) for sender, _, _, *end in PATHS]
    options = {"random": 0, "subsets": 0, "minimality": False, "batch_size": 1, **FEW}
    found = circuit.evaluate(model, {"nodes": nodes, **others}, base, source, metric, **options)
    yield numbers(*found.frame["value"]), torch.stack(expected)
    ends = numbers(scene.mean(), scene.mean(of=scene.others))
    yield numbers(*found.baseline.loc[0, ["clean", "source"]]), ends
    curve = circuit.curve(model, list(nodes), base, source, metric, sizes=[1], draws=2).frame
    yield numbers(*curve["value"].iloc[[-1, 0]]), ends


def probes(scene):
    tokens = prompts(scene.model, [*scene.rows, *scene.others])
    target = torch.linspace(-1, 1, tokens.real.numel()).double().view(tokens.real.shape)
    found = linear(scene.model, tokens, target, "mlp_out", test=[2, 3], ridge=1.0, draws=2)
    y = torch.cat([target[row][tokens.real[row]] for row in ROWS])[:, None]
    for layer in LAYERS:
        x = torch.cat([at["mlp_out", layer][0] for at in scene.clean])
        expected = torch.linalg.solve(x.T @ x + torch.eye(16).double(), x.T @ y)
        yield found.weights[f"mlp_out.{layer}", "target"].weight, expected


def maps(scene):
    recorded = patterns.record(scene.model, scene.base, batch_size=1)
    mean = patterns.attention(scene.model, recorded, positions=[0]).mean
    one = {"previous": patterns.previous(5)}
    scores = patterns.scores(scene.model, scene.base, one, draws=2, batch_size=1).frame["score"]
    for layer in LAYERS:
        by_hand = [at["pattern", layer][0] for at in scene.clean]
        yield mean[layer, :, 0, :3], sum(x[:, 0, :3] for x in by_hand) / 2
        diagonals = torch.cat([x.diagonal(-1, 1, 2) for x in by_hand], 1)
        yield numbers(*scores[4 * layer : 4 * layer + 4]), diagonals.mean(1)
        for row, x in enumerate(by_hand):
            yield recorded.patterns[layer][0][row][:, : x.shape[1], : x.shape[1]], x


def transplants(scene):
    twice = {name: 2 * x for name, x in scene.model.state_dict().items()}
    output = run(scene.model, scene.base, transplanted(twice, "embed"))
    scene.hooks.setdefault(("embed", None), []).insert(0, lambda x: 2 * x)
    found = [(scene.own(output, row), scene.by_hand(row)[0]) for row in ROWS]
    scene.hooks["embed", None].pop(0)
    yield from found


def stored(scene):
    """From a cache of TransformerLens' own, in which a bridge may call the pattern scores."""
    scene.inside.append(True)  # a run inside would write to the cache, too
    with hold_eval_mode(scene.model), torch.no_grad():
        stored = scene.model.run_with_cache(torch.stack(scene.others))[1]
    scene.inside.clear()
    for site in ("q", "z", "mlp_out", "scores"):
        with suppress(CircuitsError) if scene.bridged and site == "scores" else ExitStack():
            output = run(scene.model, scene.base, patch.activations(f"{site}.1", stored))
            for row in ROWS:
                _, theirs = scene.by_hand(row, of=scene.others)
                new = (site, 1), lambda row, x, new=theirs[site, 1]: new
                yield scene.own(output, row), scene.by_hand(row, new)[0]


VERBS = (sweeps, lenses, runs, attributions, paths, edges, circuits, probes, maps, transplants, stored)


def refusal(scene, verb):
    """What a verb says that does not serve what is around it."""
    hooked = {site for site, _ in scene.hooks}
    of_stream = bool(hooked & {"resid_pre", "resid_mid", "resid_post"})
    if scene.block and verb in (attributions, edges, circuits):
        return "a block around this call edits the model"
    if scene.shares_memory and verb is transplants:
        return "are one parameter, or share its memory"
    if verb is lenses and (of_stream or hooked & {"attn_out", "logits"}):
        return "adds something of its own|is not a linear function"
    return "a hook of yours is on the residual" if verb is edges and of_stream else None


def check(verb, around, kind, seed, even=False):
    scene = Scene(kind, seed, even or "a hook on the logits" in around or verb is stored)
    list(map(scene.surround, around))
    most = 1e-5 if scene.bridged else 1e-8
    same = partial(torch.testing.assert_close, rtol=most, atol=most)
    with scene.for_now:
        before = footprint(scene.model)
        # Some verbs run other prompts, too, which a mask of these does not fit.
        starts = scene.base.real & (scene.base.real.cumsum(1) == 1)
        positions = starts if verb in (sweeps, lenses, maps, paths) else [0]
        block = [edit("v.0", lambda x: 2 * x, positions=positions)] if scene.block else []
        with intervene(scene.model, *block):
            if message := refusal(scene, verb):
                with pytest.raises(CircuitsError, match=message):
                    list(verb(scene))
            else:
                for found, expected in verb(scene):
                    same(found.detach(), expected.detach())
            output = run(scene.model, scene.base)
            for row in ROWS:
                same(scene.own(output, row), scene.by_hand(row)[0])
        assert differences(before, footprint(scene.model)) == []


#: What is tried daily, with what a model must have for it.
TOGETHER = (
    ("a hook on a component, a refused run inside, dropout in train mode, frozen weights and gradients", ""),
    ("a hook on the logits, weights that share memory", HOOKED),
    ("a hook on the MLP's input, a hook on a component", "use_hook_mlp_in"),
    ("a block, a hook on a site", ""),
)
AROUND = list(dict.fromkeys(one for several, _ in TOGETHER for one in several.split(", ")))


@pytest.mark.parametrize("at", range(len(TOGETHER)))
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_numbers_are_those_by_hand(verb, at):
    around, needed = TOGETHER[at]
    fitting = [kind for kind in KINDS if needed in (*kind, "") or needed in models.FEATURES.get(kind[0], ())]
    if fitting:
        number = 2 * VERBS.index(verb) + at
        check(verb, around.split(", "), fitting[number % len(fitting)], number)


@pytest.mark.parametrize("seed", range(150))
def test_numbers_are_those_by_hand_in_a_wider_draw(seed):
    chance = random.Random(seed)
    around, verb = chance.sample(AROUND, chance.randint(1, 3)), chance.choice(VERBS)
    check(verb, around, chance.choice(KINDS), seed, chance.random() < 0.3)
