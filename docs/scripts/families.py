"""The table of Hugging Face families on the index page of `circuits`, made from the code."""

from __future__ import annotations

from circuits.model.sites import KINDS
from circuits.model.supported_models import FAMILIES, PROVED_VERSIONS


def table() -> str:
    """Returns a row for each family: what it wraps, the sites that it lacks, and whether it has paths and edges."""
    rows = ["| family | class | sites not supported | paths, edges |", "|---|---|---|---|"]
    for family in FAMILIES:
        lacking = ", ".join(f"`{name}`" for name in KINDS if name not in family.sites) or "none"
        rows.append(f"| {family.name} | `{family.wrapped}` | {lacking} | {'yes' if family.paths else 'no'} |")
    versions = "; ".join(f"{name} {', '.join(proved)}" for name, proved in PROVED_VERSIONS.items())
    return "\n".join(rows) + f"\n\nProved with {versions}."
