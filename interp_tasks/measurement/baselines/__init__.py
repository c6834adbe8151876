"""Models beside methods that need no training."""
