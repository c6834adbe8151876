"""The direct path from one component to another: what the receiver would be if only this path carried the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from circuits.calls import Call
from circuits.errors import CircuitsError
from circuits.interventions import Firing, Intervention, Replacement, Write
from circuits.places import Edit, Place
from circuits.references import Reference
from circuits.replacements import DIRECTION
from circuits.sites import KINDS, Site
from circuits.surface import Surface

#: Where a component's output can be taken, and where it can be received, with their order within a layer.
SENDERS = {"embed": -2, "pos_embed": -2, "z": 0, "attn_out": 1, "mlp_post": 2, "mlp_out": 3}
RECEIVERS = {"q": 0, "k": 0, "v": 0, "mlp_pre": 2, "resid_post": 4}
_PER_LAYER = 10


@dataclass(frozen=True, eq=False)
class Frozen(Replacement):
    """The activations of a pass on the same inputs."""

    values: dict[str, Tensor]

    def value(self, current: Tensor, firing: Firing) -> Tensor:
        return self.values[firing.write.hook]

    def describe(self) -> dict[str, Any]:
        return {"value": "frozen", "hooks": list(self.values)}


@dataclass(frozen=True)
class Received(Replacement):
    """A receiver's activation when its senders, and nothing else before it, are replaced."""

    senders: tuple[Write, ...]
    freeze: tuple[Write, ...]  # all that must stay as it is; their replacement is filled in at each run
    receivers: tuple[str, ...]

    def references(self, write: Write) -> dict[str, Reference]:
        return {
            f"{number} {name}": reference
            for number, sender in enumerate(self.senders)
            for name, reference in sender.replacement.references(sender).items()
        }

    def prepare(self, call: Call) -> dict[str, Tensor] | None:
        if not call.frame.whole:
            return None
        found: dict[str, Tensor] = call.once(id(self), lambda: self._receive(call))
        return found

    def _receive(self, call: Call) -> dict[str, Tensor]:
        clean = Frozen(call.run((), [write.hook for write in self.freeze]))
        held = [write.replaced_by(clean) for write in self.freeze]
        return call.run([*held, *self.senders], self.receivers)

    def value(self, current: Tensor, firing: Firing) -> Tensor:
        if firing.prepared is None:
            raise CircuitsError(
                f"{firing.write.label}: call the whole model; a path is run on its inputs first"
            )
        value: Tensor = firing.prepared[firing.write.hook]
        return value

    def describe(self) -> dict[str, Any]:
        return {"value": "received", "receivers": list(self.receivers)}


@dataclass(frozen=True)
class Path(Intervention):
    """From sender to receiver along the residual stream, past everything else or (`through`) by way of the MLPs."""

    sender: Edit
    receivers: tuple[Place, ...]
    through: str | None

    def plan(self, surface: Surface) -> tuple[Write, ...]:
        senders = self.sender.plan(surface)
        try:
            # Without a receiver the path leads to the read-out.
            receivers = self.receivers or (Place(Site("resid_post", surface.n_layers - 1)),)
            places = [(place, *found) for place in receivers for found in place.on(surface)]
        except CircuitsError as error:
            raise CircuitsError(f"{self.label}: {error}") from error
        last = max(order_of(write.kind.name, write.layer, SENDERS) for write in senders)
        for place, layer, _, _ in places:
            # Equal within a layer: z is made of q, k and v, and mlp_post of mlp_pre.
            if order_of(place.site.kind.name, layer, RECEIVERS) <= last:
                raise CircuitsError(
                    f"{self.label}: no path to {place.site.kind.name}.{layer}: it is computed before the sender is"
                )
        received = Received(
            senders,
            self._freeze(surface, senders),
            tuple(dict.fromkeys(hook for _, _, hook, _ in places)),
        )
        return tuple(
            Write(self.label, hook, place.site.kind, layer, received, heads=heads)
            for place, layer, hook, heads in places
        )

    def _freeze(self, surface: Surface, senders: Sequence[Write]) -> tuple[Write, ...]:
        """Every head's z, and every MLP's output unless the path may run through MLPs."""
        sending = {write.hook for write in senders}
        found: list[Write] = []
        for name in ("z",) if self.through == "mlps" else ("z", "mlp_out"):
            for layer in range(surface.n_layers):
                hook = KINDS[name].hook.format(layer)
                # An MLP that sends from its neurons must be let on to its output.
                inner = name == "mlp_out" and KINDS["mlp_post"].hook.format(layer) in sending
                if hook in surface.hooks and not inner:
                    found.append(Write(self.label, hook, KINDS[name], layer, _NOTHING))
        return tuple(found)

    def describe(self) -> dict[str, Any]:
        sender = self.sender.describe()
        return {
            "intervention": "patch.path",
            "sender": sender["places"],
            "positions": sender["positions"],
            "source": sender["source"],
            "receiver": [place.describe() for place in self.receivers] or "output",
            "through": self.through,
            "direction": DIRECTION,
        }

    @property
    def title(self) -> str:
        return f"{self.label} ({DIRECTION})"

    @property
    def label(self) -> str:
        sender = "; ".join(map(str, self.sender.places))
        receiver = "; ".join(map(str, self.receivers)) or "output"
        return f"patch.path({sender} -> {receiver})"


def check_ends(sender: Site, receivers: Sequence[Site]) -> None:
    """Only what writes to the residual stream can send, only what reads from it can receive."""
    if sender.kind.name not in SENDERS:
        raise CircuitsError(
            f"patch.path: {sender} does not write to the residual stream; senders are heads (z) and "
            f"{', '.join(name for name in SENDERS if name != 'z')}"
        )
    for site in receivers:
        if site.kind.name not in RECEIVERS:
            raise CircuitsError(
                f"patch.path: {site} does not read from the residual stream; receivers are heads (their q, k and "
                f"v), {', '.join(RECEIVERS)}"
            )


def order_of(name: str, layer: int | None, table: dict[str, int]) -> int:
    """Where in the order of computation a site comes, by `SENDERS` or `RECEIVERS`."""
    return table[name] + (_PER_LAYER * layer if layer is not None else -_PER_LAYER)


_NOTHING = Frozen({})
