"""Interventions as values that name places and replacements, and the code that applies them."""
