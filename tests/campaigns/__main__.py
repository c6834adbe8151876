"""``python -m tests.campaigns NAME``; exit status 1 if a trial failed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import cast

#: Sums depend on the number of threads, and a process with threads cannot be forked.
for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

from tests.campaigns import __doc__ as about  # noqa: E402
from tests.campaigns.frame import Campaign, Unknown, perform, shown  # noqa: E402

NAMES = ("kill", "mangle", "disk", "grid", "bits", "threads", "interrupts", "options", "device")


def whole(least: int) -> Callable[[str], int]:
    """Reads whole numbers from ``least`` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise ValueError(text)
        return int(text)

    number.__name__ = f"whole number from {least} on"
    return number


def number_or_text(text: str) -> int | str:
    return text if text and not text.lstrip("-").isdigit() else whole(0)(text)


number_or_text.__name__ = f"{whole(0).__name__}, or text"


def campaign_of(name: str, device: str) -> Campaign:
    """Returns a campaign by its name.

    Raises:
        Unknown: it is about a device that is not here, or whose tensors have no values.
    """
    module = importlib.import_module(f"tests.campaigns.{name}")
    if name != "device":
        return cast(Campaign, module.CAMPAIGN)
    import torch

    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise Unknown(f"--device {device}: {str(error).splitlines()[0]}") from error
    return cast(Campaign, module.on(device))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns", description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--n", type=whole(1), help="trials (default: those of the long form)")
    parser.add_argument("--seed", type=whole(0), default=0, help="number of the first trial")
    parser.add_argument(
        "--only",
        type=number_or_text,
        nargs="+",
        default=[],
        help="repeat these trials; of device also by name",
    )
    parser.add_argument("--device", default="cuda", help="of device: what is compared with the CPU")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of failures")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        campaign = campaign_of(options.name, options.device)
        summary = perform(campaign, options.n, options.seed, options.only, options.debug)
    except Unknown as error:
        parser.error(str(error))
    print(shown(summary))
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
