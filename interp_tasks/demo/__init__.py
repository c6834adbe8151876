"""The main job on the shipped models, on one page: ``interp-run demo``."""
