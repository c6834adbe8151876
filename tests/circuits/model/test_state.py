import pytest
import torch
from torch import nn

from circuits import CircuitsError
from circuits.model.state import Contents


def writes():
    """Rows, columns and heads exchanged, one entry and one bit of it: each keeps some sums."""

    def exchanged(axis):
        def write(x):
            x.copy_(x.flip(axis))

        return write

    def entry(x):
        x.view(-1)[-1] += 0.5

    def bit(x):
        x.view(-1)[6:7].view(torch.uint8)[0] ^= 1

    def signs(x):
        x.neg_()

    return {"rows": exchanged(0), "columns": exchanged(-1), "entry": entry, "bit": bit, "signs": signs}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (64, 1024), (12, 67, 33), (30011,), (300, 201)])
@pytest.mark.parametrize("kind", ["rows", "columns", "entry", "bit", "signs"])
def test_any_write_changes_the_contents(dtype, shape, kind):
    """Small tensors and large, of even and odd sizes; what is put back is as it was, and NaN equals itself."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    model.weight.data.view(-1)[3] = torch.nan
    before = model.weight.data.clone()
    contents = Contents(model)
    contents.refuse_writes("sweep")
    writes()[kind](model.weight.data)
    with pytest.raises(CircuitsError, match=r"sweep: .* has written to the model's weights \(weight\)"):
        contents.refuse_writes("sweep")
    model.weight.data.copy_(before)
    contents.refuse_writes("sweep")


def test_a_buffer_that_a_forward_fills_is_no_write():
    """Torch counts what a forward writes there; what it does not count came by way of data."""
    model = nn.Module()
    model.register_buffer("runs", torch.zeros(2))
    contents = Contents(model)
    model.runs += 1
    contents.refuse_writes("sweep")
    contents = Contents(model)
    model.runs.data += 1
    with pytest.raises(CircuitsError, match="runs"):
        contents.refuse_writes("sweep")


@pytest.mark.parametrize("scale", [1, 3200], ids=["one group", "two groups"])
def test_of_many_small_tensors_the_one_that_was_written_is_named(scale):
    """They are compared together, of any sizes; what a forward has filled beside them is no write."""
    model = nn.Module()
    sizes = {"a": 3, "b": 1, "c": 5, "d": 5, "e": 5, "f": 5, "g": 4, "h": 1}
    for name, size in sizes.items():
        model.register_parameter(name, nn.Parameter(torch.arange(scale * size).to(torch.float32)))
    model.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
    contents = Contents(model)
    model.seen |= True
    contents.refuse_writes("sweep")
    for name in sizes:
        getattr(model, name).data[-1] += 1
        with pytest.raises(CircuitsError, match=rf"weights \({name}\)"):
            contents.refuse_writes("sweep")
        getattr(model, name).data[-1] -= 1
    contents.refuse_writes("sweep")
