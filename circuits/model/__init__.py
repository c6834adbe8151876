"""Sites, heads, hooks, weights and state of a hooked model."""
