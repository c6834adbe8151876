"""Many runs, and experiments on all of them, as one command: ``grid(spec, out)``."""

from interp_tasks.grids.run import Grid, grid
from interp_tasks.recipes import Spec, read_spec, spec_of

__all__ = ["Grid", "Spec", "grid", "read_spec", "spec_of"]
