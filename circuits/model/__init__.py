"""What is known of a hooked model: which it is, its sites, heads and state."""
