"""Means over a reference batch that runs under the edit itself, so that later layers see the edited earlier ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from circuits.interventions.base import ActivationEdit
from circuits.interventions.clean_passes import Edits, MeanOver, Reference, References
from circuits.interventions.edits import Edit
from circuits.interventions.forward_pass import ForwardPass, writer
from circuits.interventions.replacements import Mean
from circuits.model.edit_state import State
from circuits.model.generation import WHOLE
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function
from circuits.model.prompts import Prompts


@dataclass(frozen=True)
class EditedMean(Mean):
    """The mean per position over the reference batch, in a pass in which `edit` is made in all earlier layers. `edit`
    is the one that this replacement belongs to; no other edit is on in that pass.
    """

    cache_safe = False

    name: str = ""
    places: tuple[Any, ...] = ()
    positions: Any = None

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        edit = Edit(self.name, self.places, self, self.positions)
        assert write.layer is not None  # patterns belong to layers
        before = EarlierLayers(edit, write.layer)
        return {"mean": Reference(self.prompts, write.hook, write.kind, MeanOver(), before)}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "of": "edited"}


@dataclass(frozen=True)
class EarlierLayers(Edits):
    """An edit in all layers before `layer`."""

    edit: Edit
    layer: int

    def writes(self, surface: HookedModel) -> Iterator[ActivationEdit]:
        for write in self.edit.plan(surface):
            if write.layer is not None and write.layer < self.layer:
                yield write

    def needed(self, surface: HookedModel) -> Iterator[Reference]:
        for write in self.writes(surface):
            yield from write.replacement.references(write).values()

    def functions(
        self, surface: HookedModel, references: References, rows: slice, prompts: Prompts
    ) -> list[tuple[str, Function]]:
        # A separate state, so that the edits of the blocks around this pass do nothing.
        call = ForwardPass(surface, references, State(rows=rows, total=len(prompts)))
        if prompts.padded:
            call.run.decode_step = replace(WHOLE, real=prompts.real[rows].to(surface.device))
        return [(write.hook, writer(write, call)) for write in self.writes(surface)]
