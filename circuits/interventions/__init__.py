"""Interventions as values that name places and replacements, and the engine that carries them out."""
