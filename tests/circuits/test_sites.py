import pytest

from circuits import CircuitsError, Site
from circuits.sites import KINDS


def test_three_spellings_of_one_site():
    assert Site.parse("z.2") == Site("z", layer=2) == Site.parse("blocks.2.attn.hook_z")
    assert Site.parse("hook_embed") == Site("embed")
    assert str(Site("z", 2)) == "z.2"
    assert Site("z", 2).hook() == "blocks.2.attn.hook_z"


@pytest.mark.parametrize("name", list(KINDS))
def test_every_kind_reads_its_own_hook_name(name):
    layer = 1 if KINDS[name].per_layer else None
    site = Site(name, layer)
    assert Site.parse(site.hook()) == site
    assert Site.parse(str(site)) == site


def test_a_hook_outside_the_table_is_kept_whole():
    site = Site.parse("blocks.0.hook_mlp_in")
    assert site.hook() == "blocks.0.hook_mlp_in"
    assert site.kind.head_axis is None


@pytest.mark.parametrize(
    ("spec", "hint"), [("patern", "pattern"), ("resid_posts.1", "resid_post"), ("", "no site")]
)
def test_unknown_site_names_the_closest(spec, hint):
    with pytest.raises(CircuitsError, match=hint):
        Site.parse(spec)


def test_layer_of_a_site_without_layers():
    with pytest.raises(CircuitsError, match="embed"):
        Site("embed", 1)
    with pytest.raises(CircuitsError, match="not a site"):
        Site.parse(3)
