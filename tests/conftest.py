"""For every test: one thread, seeded hypothesis, and no third-party import while warnings are errors."""

from __future__ import annotations

import warnings

import torch
from hypothesis import Phase, settings

# Small tensors on shared cores: a second thread costs more than it brings, and one makes sums reproducible.
torch.set_num_threads(1)

settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=50)
# A longer search: pytest tests/circuits/test_properties.py --hypothesis-profile=campaign
settings.register_profile("campaign", deadline=None, database=None, max_examples=3000, print_blob=True)
# For tests/breakages.py, which asks whether a test fails and not for the smallest reason.
settings.register_profile("breakages", settings.get_profile("suite"), phases=[Phase.explicit, Phase.generate])
# What --hypothesis-profile names is loaded after this file.
settings.load_profile("suite")

with warnings.catch_warnings():
    # What it and its dependencies warn about while being imported is not ours; after it warnings are errors.
    warnings.simplefilter("ignore")
    import transformer_lens  # noqa: F401
