"""Many runs, and experiments on all of them, as one command: ``grid(spec, out)``."""

from interp_tasks.grid_spec import Spec, parse_grid_spec, read_grid_spec
from interp_tasks.grids.grid_run_and_table import GridRun, grid

__all__ = ["GridRun", "Spec", "grid", "parse_grid_spec", "read_grid_spec"]
