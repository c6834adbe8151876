"""``python -m tests.campaigns NAME``; exit status 1 if a trial failed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable

#: Sums depend on the number of threads, and a process with threads cannot be forked.
for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

from tests.campaigns import __doc__ as about  # noqa: E402
from tests.campaigns.frame import Campaign, perform, shown  # noqa: E402

NAMES = ("kill", "mangle", "disk", "grid", "bits", "threads", "options")


def whole(least: int) -> Callable[[str], int]:
    """Reads whole numbers from ``least`` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise ValueError(text)
        return int(text)

    number.__name__ = f"whole number from {least} on"
    return number


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns", description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--n", type=whole(1), help="trials (default: those of the long form)")
    parser.add_argument("--seed", type=whole(0), default=0, help="number of the first trial")
    parser.add_argument("--only", type=whole(0), nargs="+", default=[], help="repeat these trials")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of failures")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    campaign: Campaign = importlib.import_module(f"tests.campaigns.{options.name}").CAMPAIGN
    summary = perform(campaign, options.n, options.seed, options.only, options.debug)
    print(shown(summary))
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
