"""``python -m interp_tasks`` is ``interp-run``; torchrun starts it by that name."""

import sys

from interp_tasks.cli import main

if __name__ == "__main__":
    sys.exit(main())
