"""``python -m interp_tasks`` is ``interp-run``."""

import sys

from interp_tasks.cli import main

if __name__ == "__main__":
    sys.exit(main())
