"""Values that say what to change in a forward pass, and what carries them out."""
