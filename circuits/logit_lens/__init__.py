"""The logit lens and direct logit attribution: read-outs after each layer, and what each component adds directly."""

from circuits.logit_lens._lens_and_attribution import DirectAttribution, Lens, lens

__all__ = ["DirectAttribution", "Lens", "lens"]
