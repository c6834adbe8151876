"""Do joint exact effects rank edges better than single ones? Greedy removal, and growth, from a start ranking.

    python benchmarks/circuit_removal.py FOLDER [--only PATTERN] [--arms PATTERN]

FOLDER is what `circuit_quality.py prepare` and `rank` have written, with the rankings that arms start from. Removal
begins with all edges. A round takes the last two fifths of those that are left, in the order of the start ranking, in
at most 20 blocks; measures what is left without each block, one forward of the found prompts each; and removes the half
of the blocks without which the circuit does best. The last edge to go ranks first. Growth begins with none, and adds
the half of as many next blocks with which the circuit does best. "Best" is the smallest |1 - f|, f the faithfulness;
arms called "larger f" take the largest f. "Removal from integrated" is `circuit.prune`.

What counts as better, written before the first run. On the prompts that found nothing, by `circuit.curve`:
1. it wins if on one of the language model, induction, addition and 7x7 completion its CPR, the mean over splits, is
   more than 0.02 above the best of `gim` (five points and base), `integrated` and all exact effects (where they are
   measured), and the 95% interval of the paired difference from that ranking is above 0 in every split;
2. it loses if on one of the four its CPR is more than 0.005 below the better of `gim` at base and `integrated`, or its
   CMD more than 0.005 above the better's; or if on the seven known circuits the mean AUROC falls by more than 0.01
   below its start's;
3. one arm is to win and not to lose, with one setting for all models. It is then taken in. Costs are told: forwards of
   all found prompts.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from alternatives.ranking import Problem, first, spending
from circuit_problems import candidates

from circuits import circuit
from circuits.circuit._circuit_runner import CircuitRunner, PatchSetup

#: Blocks that are measured in a round, and the share of what is left that goes in it.
BLOCKS, SHARE = 20, 0.2
#: By arm, the start ranking, whether edges are removed or added, and what is best, smallest first.
Best = Callable[[float], float]


def distance(share: float) -> float:
    return abs(1 - share)


def smaller(share: float) -> float:
    return -share


ARMS: dict[str, tuple[str, bool, Best]] = {
    "removal from gim": ("ours: gim, at base", True, distance),
    "removal from integrated": ("ours: integrated", True, distance),
    "removal from gim, larger f": ("ours: gim, at base", True, smaller),
    "removal from integrated, larger f": ("ours: integrated", True, smaller),
    "growth from gim": ("ours: gim, at base", False, distance),
    "growth from integrated": ("ours: integrated", False, distance),
}


def joint_ranking(
    order: list[str], faithfulness: Callable[[list[str]], float], remove: bool, best: Best
) -> list[str]:
    """Returns edges, largest first, by greedy removal from all of them, or by greedy growth from none.

    Args:
        order: the start ranking.
    """
    waiting, decided = list(reversed(order)) if remove else list(order), list[str]()
    while waiting:
        left = len(waiting) if remove else max(len(decided), BLOCKS // 4)
        count = max(1, round(SHARE * left))
        considered = waiting[: 2 * count]
        size = -(-len(considered) // BLOCKS)
        blocks = [considered[at : at + size] for at in range(0, len(considered), size)]
        scores: list[float] = []
        for block in blocks:
            kept = [edge for edge in waiting if edge not in set(block)] if remove else [*decided, *block]
            scores.append(best(faithfulness(kept)))
        by_score = np.argsort(scores, kind="stable")
        for at in by_score[: max(1, len(blocks) // 2)]:
            decided += blocks[at]
        waiting = [edge for edge in waiting if edge not in set(decided)]
    return decided[::-1] if remove else decided


def rank(path: Path, arm: str) -> None:
    problem = Problem.load(path)
    model, (base, source, metric) = problem.model(), problem.half("found")
    start, remove, best = ARMS[arm]
    slug = "".join(letter if letter.isalnum() else "-" for letter in start)
    scores = json.loads((path / f"ranking.{slug}.json").read_text())["edges"]
    order = first(scores, len(scores))
    assert set(order) == set(candidates(model))
    with spending(model, len(base)) as spent:
        rows = torch.arange(len(base))
        examples = PatchSetup.parse("removal", model, base, source, metric, rows, "resample")
        runs = CircuitRunner.of(examples, None, 0, 1)

        def faithfulness(kept: list[str]) -> float:
            measured = runs.measure_circuit(circuit.edges(kept, model))
            return float(next(runs.faithfulness([measured]))[1].share[0])

        found = joint_ranking(order, faithfulness, remove, best)
    scored = {edge: float(len(found) - place) for place, edge in enumerate(found)}
    problem.write(f"ours: {arm}", scored, **spent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*.*", help="pattern of problems")
    parser.add_argument("--arms", default="*", help="pattern of arms")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for path in sorted(given.folder.glob(given.only)):
        for arm in fnmatch.filter(ARMS, given.arms):
            rank(path, arm)


if __name__ == "__main__":
    main()
