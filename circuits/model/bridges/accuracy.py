"""Says how far numbers on a bridge may be from those of the model, by dtype, relative to the largest entry."""

import torch

# Between the recomputed attention, or a sum of the stream, and the model's own. Both come from the same operations on
# the same tensors, so on most machines they are equal.
RECOMPUTED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The same where the dtype is none of these.
COARSEST = 3e-2

# Of results, where that is promised.
PROMISED = {torch.float64: 1e-10, torch.float32: 1e-5}
