"""Runs a search: takes the next trial until there are as many as the plan says."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path

import optuna
from optuna import Study
from optuna.trial import Trial, TrialState

from interp_tasks.checkpoints.atomic import folder_of
from interp_tasks.checkpoints.run_files import check_free
from interp_tasks.devices import check_device
from interp_tasks.errors import UserError
from interp_tasks.measurement.subjects import Progress
from interp_tasks.search.locks import Claim, claim, claim_if_free
from interp_tasks.search.plan import Plan
from interp_tasks.search.result import SearchResult
from interp_tasks.search.storage import (
    check_reachable,
    check_storage,
    default_storage,
    opened,
)
from interp_tasks.search.trials import built, carry_out, resolve_objective, run_name
from interp_tasks.training.trainer import check_precision
from tasks.seeds import derive_seed

#: The claim under which trials are dealt out and results written.
TURN = "search"


def search(
    plan: Plan,
    *,
    out: str | Path,
    trials: int = 10,
    storage: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> SearchResult:
    """Train runs until the search has so many trials, those of earlier calls and of other processes counted.

    Trials that a killed process left are taken up where their runs stopped. Processes with the same ``out`` and
    ``storage`` share the work. What trial number n tries depends on the seed, n and the trials told before, so a
    search that was killed goes on to the same end.

    Args:
        out: the folder of the search: a run folder per trial, ``trials.csv``, ``trials.json``, ``search.html``.
        storage: URL of a database; ``None``: ``OUT/search.db``.

    Returns:
        All trials, and what follows from them.

    Raises:
        UserError: in one line, for settings that cannot be, for a folder or storage that holds another search, and
            for what stops a run other than divergence; such a trial is taken up again by the next call.
    """
    if trials < 1:
        raise UserError(f"--trials {trials}: at least 1")
    check_device(device)
    out = folder_of(out)
    url = storage or default_storage(out)
    check_free(out, "search")
    check_storage(url)
    check_reachable(url)
    plan.check_values(built)
    first = {one.key: one.samples()[0] for one in plan.space.dimensions}
    base = plan.resolved(first)
    for one in plan.space.dimensions:
        for value in one.samples() if one.key == "train.precision" else ():
            check_precision(plan.resolved({**first, one.key: value}).train, device)
    check_precision(base.train, device)
    key, direction = resolve_objective(plan.objective, *built(base))
    identity = plan.identity(key, direction)
    with warnings.catch_warnings():
        # Of what Optuna says about its own future.
        warnings.filterwarnings("ignore", module="optuna")
        with ExitStack() as stack:
            with claim(out, TURN):
                study = stack.enter_context(opened(url, out, identity))
            # Before half of the steps nothing is said about a run whose drop is yet to come.
            study.pruner = optuna.pruners.MedianPruner(n_warmup_steps=base.train.steps // 2)
            while (dealt := next_trial(study, plan, out, trials)) is not None:
                trial, lock = dealt
                with lock:
                    shown = None if progress is None else counted(progress, trial.number, trials)
                    carry_out(plan, study, trial, out, key, device, shown)
            with claim(out, TURN):
                result = SearchResult.of(study, identity, out)
                result.write(out)
    return result


def next_trial(study: Study, plan: Plan, out: Path, trials: int) -> tuple[Trial, Claim] | None:
    """Returns an abandoned trial or, while there are too few, a new one; ``None`` when there is neither."""
    with claim(out, TURN):
        earlier = study.get_trials(deepcopy=False)
        for left in earlier:
            if left.state is not TrialState.RUNNING:
                continue
            lock = claim_if_free(out, run_name(left.number))
            if lock is None:
                continue
            # It may have been finished since it was looked at, and let go therefore.
            if study.get_trials(deepcopy=False)[left.number].state is not TrialState.RUNNING:
                with lock:
                    continue
            study.sampler = sampler(plan, left.number)
            return Trial(study, left._trial_id), lock
        if len(earlier) >= trials:
            return None
        number = len(earlier)
        lock = claim(out, run_name(number))
        study.sampler = sampler(plan, number)
        trial = study.ask()
        return trial, lock


def sampler(plan: Plan, number: int) -> optuna.samplers.BaseSampler:
    """Returns a sampler for each trial: one for all would begin again with its first draws after an interruption."""
    return optuna.samplers.TPESampler(seed=derive_seed(plan.seed, "trial", number) % 2**32)


def counted(progress: Progress, number: int, trials: int) -> Progress:
    return lambda step, steps, text: progress(step, steps, f"trial {number + 1} of {trials}  {text}")
