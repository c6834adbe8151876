"""Says in words what tells the units of a grid apart: what each run changes, and the name under which it ships."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interp_tasks.grids.units import MeasureUnit, Plan, TrainUnit
from interp_tasks.recipes.recipe import orders_of
from interp_tasks.recipes.spec import Spec


@dataclass(frozen=True)
class Told:
    """What tells a unit from the others.

    Attributes:
        words: ``d_model=64``, ``ablation of d_model=64``; the same for all seeds of a configuration, and for
            experiments on each of them.
        seeds: of its runs.
        configuration: the same for those units, and for no other.
        settings: what the file says that is not the same for all units of this kind, by key.
        ships: the name of its run in the zoo; ``None`` where it does not ship.
    """

    words: str
    seeds: tuple[int, ...]
    configuration: str
    settings: Mapping[str, Any]
    ships: str | None = None


def told_apart(spec: Spec, planned: Plan) -> tuple[dict[str, Told], str]:
    """Returns what tells each unit from the others, by its key, and the settings that words leave out.

    Those are what most configurations have, of settings that all name.
    """
    names = {
        (run.block.task, run.block.preset, repr(run.settings), run.seed): run.name for run in orders_of(spec)
    }
    differing = apart([configuration(unit) for unit in planned.train])
    usual = usual_values(planned.train, differing)
    told: dict[str, Told] = {}
    changes: dict[str, str] = {}
    for unit, settings in zip(planned.train, differing, strict=True):
        resolved, seed = unit.resolved, unit.resolved.train.seed
        said = {key: value for key, value in settings.items() if usual.get(key, ...) != value}
        changes[unit.folder] = pairs(said) or resolved.task_name
        name = names.get((resolved.task_name, resolved.preset, repr(unit.given), seed))
        told[unit.key] = Told(changes[unit.folder], (seed,), family_of(unit.folder), settings, name)
    seeds = {unit.folder: unit.resolved.train.seed for unit in planned.train}
    for experiment in dict.fromkeys(unit.asked.name for unit in planned.measure):
        units = [unit for unit in planned.measure if unit.asked.name == experiment]
        asked = [{"at": list(unit.asked.at), **unit.asked.settings} for unit in units]
        for each, settings in zip(units, apart(asked), strict=True):
            # Its marks are told beside the words.
            arguments = pairs({key: value for key, value in settings.items() if key != "at"})
            how = f" ({arguments})" if arguments else ""
            families = list(dict.fromkeys(map(family_of, each.runs)))
            told[each.key] = Told(
                f"{experiment}{how} of {runs_of(each, changes)}",
                tuple(seeds[run] for run in each.runs if run in seeds) if len(families) == 1 else (),
                f"{experiment} {settings} {families}",
                settings,
            )
    return told, pairs(usual)


def configuration(unit: TrainUnit) -> dict[str, Any]:
    return {"task": unit.resolved.task_name, "preset": unit.resolved.preset, **unit.given}


def family_of(folder: str) -> str:
    """Returns the folder that the seeds of a run share."""
    return str(Path(folder).parent)


def apart(all_settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns of each mapping the keys whose value is not the same in all, or that not all have."""
    keys = dict.fromkeys(key for each in all_settings for key in each)
    differ = [key for key in keys if len({written(each, key) for each in all_settings}) > 1]
    return [{key: each[key] for key in differ if key in each} for each in all_settings]


def usual_values(units: Sequence[TrainUnit], differing: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values that more than half of the configurations have, of settings that none leaves out."""
    each = list(
        {family_of(unit.folder): settings for unit, settings in zip(units, differing, strict=True)}.values()
    )
    usual = {}
    for key in each[0] if each else ():
        most, count = Counter(written(settings, key) for settings in each).most_common(1)[0]
        if 2 * count > len(each) and all(key in settings for settings in each):
            usual[key] = json.loads(most)
    return usual


def written(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else ""


def pairs(settings: Mapping[str, Any]) -> str:
    """Returns settings as ``--set`` takes them, but for their sections: ``d_model=64 train_parts=mlp,embed``."""
    return " ".join(f"{key.rpartition('.')[2]}={plain(value)}" for key, value in settings.items())


def plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def runs_of(unit: MeasureUnit, changes: Mapping[str, str]) -> str:
    """Returns the runs of an experiment: by what they change, or how many where they are of several configurations."""
    if len(set(map(family_of, unit.runs))) > 1:
        return f"{len(unit.runs)} runs"
    text = changes.get(unit.runs[0], unit.runs[0])
    return f"all seeds of {text}" if len(unit.runs) > 1 else text
