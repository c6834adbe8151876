"""The result of a search: its trials, how much each setting matters, and the page that shows both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.trial import TrialState

from interp_tasks.pages import Page, versions, write_together
from interp_tasks.search.trials import run_name

if TYPE_CHECKING:
    import pandas
    from optuna import Study

#: Trials with a value that fANOVA needs at least to say anything.
MIN_TRIALS = 4


@dataclass(frozen=True)
class SearchResult:
    """The trials of a search.

    Attributes:
        identity: what was searched, as ``search.json`` has it.
        trials: by number: ``trial``, ``state`` (complete, pruned, failed, running), ``value``, ``params``, ``run``,
            ``same_as`` (a trial whose value it took) and ``reason``.
        importances: setting -> share of the variance of the objective that fANOVA (Hutter et al. 2014) lays to it,
            largest first, their sum 1; empty where there is too little to tell from.
    """

    identity: Mapping[str, Any]
    trials: Sequence[Mapping[str, Any]]
    importances: Mapping[str, float]
    versions: Mapping[str, str] = field(default_factory=versions, repr=False)

    @classmethod
    def of(cls, study: Study, identity: Mapping[str, Any], out: Path) -> SearchResult:
        """Reads the trials of a study, and how much each setting mattered."""
        trials = []
        for trial in study.get_trials(deepcopy=False):
            same_as = trial.user_attrs.get("same_as")
            trials.append(
                {
                    "trial": trial.number,
                    "state": {TrialState.FAIL: "failed"}.get(trial.state, trial.state.name.lower()),
                    # Of a pruned trial Optuna keeps the last report, which no finished one compares with.
                    "value": trial.value if trial.state is TrialState.COMPLETE else None,
                    "params": {key: trial.params[key] for key in identity["space"] if key in trial.params},
                    "run": str(out / run_name(trial.number if same_as is None else same_as)),
                    "same_as": same_as,
                    "reason": trial.user_attrs.get("reason"),
                }
            )
        with_search = {**versions(), **{name: version(name) for name in ("optuna", "scikit-learn")}}
        return cls(identity, trials, importances(study, identity["sampler"]["seed"]), with_search)

    @property
    def ranked(self) -> list[Mapping[str, Any]]:
        """Complete trials, the best first; of equal ones the earlier."""
        sign = -1 if self.identity["objective"]["direction"] == "maximize" else 1
        complete = [trial for trial in self.trials if trial["value"] is not None]
        return sorted(complete, key=lambda trial: sign * trial["value"])

    @property
    def best(self) -> Mapping[str, Any] | None:
        return next(iter(self.ranked), None)

    def frame(self) -> pandas.DataFrame:
        """Returns a row per trial, the best first, then those without a value; a column per setting."""
        import pandas

        rest = [trial for trial in self.trials if trial["value"] is None]
        columns = ["trial", "value", *self.identity["space"], "state", "run", "same_as", "reason"]
        rows = [{**trial, **trial["params"]} for trial in [*self.ranked, *rest]]
        frame = pandas.DataFrame(rows, columns=columns)
        return frame.astype({"value": "float64", "same_as": "Int64"})

    def to_json(self) -> str:
        content = {
            "search": dict(self.identity),
            "best": self.best,
            "importances": dict(self.importances),
            "trials": list(self.trials),
            "versions": dict(self.versions),
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def to_csv(self) -> str:
        text: str = self.frame().to_csv(index=False)
        return text

    def summary(self) -> str:
        """Returns a text such as ``12 trials: 10 complete, 2 pruned``."""
        counts: dict[str, int] = {}
        for trial in self.trials:
            counts[trial["state"]] = counts.get(trial["state"], 0) + 1
        of_states = ", ".join(f"{count} {state}" for state, count in counts.items())
        return f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)}: {of_states}"

    def page(self) -> Page:
        """Returns a page of importances, the course of the search, and the objective against every setting."""
        from interp_tasks.search.page import page

        return page(self.identity, self.ranked, self.frame(), self.importances, self.summary(), self.versions)

    def write(self, folder: Path) -> list[Path]:
        """Writes ``trials.csv``, ``trials.json`` and ``search.html``, together or not at all."""
        return write_together(
            {
                folder / "trials.csv": self.to_csv(),
                folder / "trials.json": self.to_json(),
                folder / "search.html": self.page().html(),
            }
        )


def importances(study: Study, seed: int) -> dict[str, float]:
    """Returns fANOVA importances over complete trials; empty where these are too few, or all equal."""
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < MIN_TRIALS or len({trial.value for trial in complete}) < 2:
        return {}
    # A setting that all of them share was never varied, and has no part in it.
    shares = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=seed % 2**32))
    return {key: float(share) for key, share in shares.items()}
