import numpy as np
import pytest
import torch

from circuits import Site
from circuits.model.sites import KINDS


def test_three_spellings_of_one_site():
    assert Site.parse("z.2") == Site("z", layer=2) == Site.parse("blocks.2.attn.hook_z")
    assert Site.parse("hook_embed") == Site("embed")


@pytest.mark.parametrize("name", list(KINDS))
def test_every_kind_reads_its_own_hook_name(name):
    layer = 1 if KINDS[name].per_layer else None
    site = Site(name, layer)
    assert Site.parse(site.hook()) == site
    assert Site.parse(str(site)) == site


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("layer", [np.int64(1), np.uint8(1), torch.tensor(1)], ids=type)
def test_whole_numbers_of_every_type_are_the_same_layer(layer):
    site = Site("z", layer)
    assert site == Site("z", 1)
    assert hash(site) == hash(Site("z", 1))
    assert (type(site.layer), str(site)) == (int, "z.1")
