"""The demo: its page against the functions it shows, on stand-ins for the shipped models, and what it says."""

import re

import numpy as np
import pytest
import torch

import tasks
from interp_tasks.checkpoints import load_checkpoint
from interp_tasks.cli import main
from interp_tasks.demo import demo, demo_page
from interp_tasks.pages import Figure
from tests.interp_tasks.logs import write_run_of_task


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("stand-ins")
    matrix = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)
    addition = tasks.get("modular-addition", p=7)
    settings = matrix.Model(n_layers=1, n_heads=2, d_model=8, init_std=0.4)
    write_run_of_task(tmp_path / "matrix", matrix, settings, after=0.0)
    small = addition.Model(n_layers=1, n_heads=2, d_model=8, init="nanda", normalization=None)
    write_run_of_task(tmp_path / "addition", addition, small, before=0.0, after=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interp_tasks.demo.MATRIX_RUN", str(tmp_path / "matrix"))
        patch.setattr("interp_tasks.demo.MODULAR_RUN", str(tmp_path / "addition"))
        patch.chdir(tmp_path)
        yield tmp_path


def test_demo_prints_ten_lines_and_writes_the_page(stand_ins, capsys):
    assert main(["demo", "--samples", "12"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "wrote interp-demo.html\n"
    lines = captured.out.splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 80
    page = (stand_ins / "interp-demo.html").read_text(encoding="utf-8").partition("<main>")[2]
    links = re.findall(r'<a href="(https[^"]+)"', page)
    assert links == ["https://arxiv.org/abs/2410.22244", "https://arxiv.org/abs/2301.05217"]


def forward(checkpoint, tokens, uniform):
    """A model's output, with its maps overwritten by plain hooks."""

    def even(pattern, hook):
        return torch.full_like(pattern, 1 / pattern.shape[-1])

    hooks = [(name, even) for name in checkpoint.model.hook_dict if name.endswith("hook_pattern")] * uniform
    with torch.no_grad():
        return checkpoint.model.run_with_hooks(tokens, fwd_hooks=hooks)


@pytest.fixture(scope="module")
def page(stand_ins):
    """The page's figures, by what they are in words."""
    sections = demo_page(demo(samples=12)).sections
    return {section.title: section.figure for section in sections if isinstance(section, Figure)}


def steps_of(figure):
    """Of each step of a slider the numbers of the maps, and the titles of panels."""
    (slider,) = figure.layout.sliders
    return [(step.args[0]["z"], [*step.args[1].values()]) for step in slider.steps]


def test_a_matrix_on_the_page_is_what_the_models_fill_in(stand_ins, page):
    run = str(stand_ins / "matrix")
    checkpoints = [load_checkpoint(f"{run}@{step}") for step in (10, 40)]
    sample = checkpoints[0].task.sample(12, seed=0)
    last = forward(checkpoints[1], sample.tokens, uniform=False)[..., 0]
    unseen = torch.where(sample.extras["hidden"], last - sample.targets, torch.nan)
    ranked = unseen.square().nanmean(1).nan_to_num(torch.inf).argsort(stable=True)
    batch = sample[ranked[[6]]]
    hidden = batch.extras["hidden"].reshape(3, 3).numpy()
    truth = batch.targets.reshape(3, 3).numpy()
    figure = page["A matrix, and what the model makes of it"]
    for checkpoint, (maps, titles) in zip(checkpoints, steps_of(figure), strict=True):
        given, whole, *made = np.array(maps, dtype=float)
        assert whole == pytest.approx(truth, rel=1e-3)
        assert (np.isnan(given) == hidden).all()
        assert titles[0] == f"Given: {hidden.sum()} of 9 are blank"
        for uniform, output, title in zip((False, True), made, titles[2:], strict=True):
            expected = forward(checkpoint, batch.tokens, uniform)[..., 0].reshape(3, 3).numpy()
            assert output == pytest.approx(expected, rel=1e-3, abs=1e-6)
            error = ((expected - truth) ** 2)[hidden].mean()
            # Two digits.
            assert float(title.rpartition("error ")[2]) == pytest.approx(error, rel=0.051)
        # An edit that did nothing would pass all of the above but this.
        assert not np.allclose(*made)
