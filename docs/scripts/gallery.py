"""docs/images/gallery/*.png and docs/gallery.md: figures of the library and the commands, of the shipped models.

    python -P docs/scripts/gallery.py [NAME ...]

draws all figures, or those named. Needs playwright, which brings no browser here, and Debian's chromium.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from circuits import ablate, fourier, grid, heads, patch, patterns, plots, sweep
from circuits.figures.panel_grid import least_readable_width, untitled
from interp_tasks import experiments, load_checkpoint
from interp_tasks.pages import Figure, Page

DOCS = Path(__file__).parents[1]
FOLDER = DOCS / "images" / "gallery"
CHROMIUM = "/usr/bin/chromium"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH, MARGIN, SCALE = 760, 60, 1.25
MATRIX, ADDITION = "zoo:matrix-completion-7x7", "zoo:modular-addition-113"
SAMPLES = 64


@dataclass(frozen=True)
class Shown:
    """A figure of the gallery: its heading, what it shows, what makes it, and how it is drawn here."""

    title: str
    shows: str
    makes: str
    draw: Callable[[], Any]
    scale: float = SCALE


def batch_of(ref: str) -> tuple[Any, Any]:
    checkpoint = load_checkpoint(ref)
    return checkpoint, checkpoint.task.sample(SAMPLES, seed=0)


def effects() -> Any:
    checkpoint, batch = batch_of(f"{MATRIX}@post")
    edits = ablate.each(ablate.uniform, heads("all", checkpoint.model))
    result = sweep(checkpoint.model, batch.tokens, edits, metric=checkpoint.task.metrics, batch=batch)
    return result.plot("mse_masked")


def attention_of_addition() -> Any:
    checkpoint, batch = batch_of(f"{ADDITION}@post")
    return plots.attention(patterns.attention(checkpoint.model, batch.tokens), labels=["a", "b", "="])


def diffuseness() -> Any:
    checkpoint, batch = batch_of(f"{MATRIX}@post")
    return plots.heads({"diffuseness": patterns.attention(checkpoint.model, batch.tokens).diffuseness})


def spectrum() -> Any:
    found = fourier.spectrum(load_checkpoint(f"{ADDITION}@post").model.W_E[:113])
    return plots.spectrum(found, fourier.key_frequencies(found, "of-largest"))


def patched() -> Any:
    """Returns whose answer the model of addition gives, by site and position of the patch."""
    checkpoint, batch = batch_of(f"{ADDITION}@post")
    other = batch.tokens.roll(1, 0)

    def own_answer(output: Any, batch: Any) -> Any:
        return (output[:, 2].argmax(-1) == batch.tokens[:, :2].sum(1) % 113).float()

    axes = {"site": ["resid_pre.0", "resid_mid.0", "resid_post.0"], "positions": [0, 1, 2]}
    variants = grid(patch.activations, axes, source=other)
    return sweep(checkpoint.model, batch.tokens, variants, metric=own_answer, batch=batch).plot()


def smallest_circuit() -> Any:
    (found,) = experiments.circuit(f"{ADDITION}@post", samples=512, curve=False).data["circuits"].values()
    return found.plot()


def curves() -> Any:
    series = {
        run: (curve.steps, curve.values)
        for (run, _), curve in experiments.drops(MATRIX).data["curves"].items()
    }
    return plots.curve(series, x_title="step", y_title="error at hidden entries")


def of(experiment: Callable[..., Any], *arguments: Any, at: int = 0, **options: Any) -> Callable[[], Any]:
    """Returns what draws a figure of an experiment's page: the one of that number."""
    return lambda: experiment(*arguments, **options).figures()[at].figure


MARKS = [f"{MATRIX}@{mark}" for mark in ("pre", "onset", "post")]
BEFORE_AND_AFTER = [MARKS[0], MARKS[-1]]
EXCHANGED = " ".join(f"--ckpt {ref} --source {ref}" for ref in MARKS)

FIGURES = {
    "effects": Shown(
        "Effect of each head",
        "Uniform attention in one head: the growth of the error at the blanks of 64 matrices over the unedited one.",
        'sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)), ...).plot("mse_masked")',
        effects,
    ),
    "ablation": Shown(
        "Before and after the drop",
        "All heads uniform (filled) or as trained (open), 64 matrices: at blanks it costs much only after the drop.",
        f"interp-run ablation --ckpt {MARKS[0]} --ckpt {MARKS[-1]} --samples {SAMPLES} --plot",
        of(experiments.ablation, BEFORE_AND_AFTER, samples=SAMPLES),
    ),
    "transplant": Shown(
        "Weights exchanged between checkpoints",
        "Each checkpoint runs with the query, key and value weights of another; the diagonal is unedited. 64 matrices.",
        f"interp-run transplant {EXCHANGED} --samples {SAMPLES} --plot",
        of(experiments.transplant, MARKS, MARKS, samples=SAMPLES),
    ),
    "patch": Shown(
        "Activations patched by site and position",
        "Change of the share of sums answered for the run's own operands: attention moves both to the position of =.",
        "sweep(model, tokens, grid(patch.activations, axes, source=other), ...).plot()",
        patched,
    ),
    "circuit": Shown(
        "A circuit",
        "The 13 of 23 edges that addition modulo 113 needs: embeddings, four heads, MLP, output.",
        'circuit.read("addition.json").plot()',
        smallest_circuit,
    ),
    "attention": Shown(
        "Attention maps",
        "Where each head of modular addition looks, mean over 64 sums; the row of = reads both numbers and not itself.",
        'plots.attention(patterns.attention(model, batch.tokens), labels=["a", "b", "="])',
        attention_of_addition,
    ),
    "heads": Shown(
        "A number per head",
        "How evenly each head attends, mean over 64 matrices; 1 is uniform. Any array [layer head] is drawn like this.",
        'plots.heads({"diffuseness": patterns.attention(model, batch.tokens).diffuseness})',
        diffuseness,
    ),
    "spectrum": Shown(
        "Spectrum of the embeddings",
        "Nearly all of the variance of the digits' embeddings lies on a few frequencies, the key frequencies.",
        'plots.spectrum(found, fourier.key_frequencies(found, "of-largest"))',
        spectrum,
    ),
    "curve": Shown(
        "Curves",
        "The error at the blanks over training: a plateau, then a fall. Several runs, [run step], get a band.",
        'plots.curve({run: (steps, values)}, x_title="step", y_title="error at hidden entries")',
        curves,
    ),
    "training": Shown(
        "Training of a run",
        "Logged metrics, with the drop in bold; below, the share of right answers at the stored checkpoints.",
        f"interp-run runs curve --ckpt {ADDITION} --plot",
        of(experiments.curve, ADDITION),
    ),
    "fourier": Shown(
        "Spectra inside the model",
        "Embeddings and neurons of modular addition share their frequencies; the map shows pairs of them.",
        f"interp-run fourier --ckpt {ADDITION}@post --plot",
        of(experiments.fourier, f"{ADDITION}@post"),
    ),
    "embeddings": Shown(
        "Embeddings",
        "Values (coloured by size) lie along a curve; positions form groups by column (a colour and mark each).",
        f"interp-run matrix embeddings --ckpt {MARKS[-1]} --plot",
        of(experiments.embeddings, MARKS[-1]),
        scale=1.0,
    ),
    "probe": Shown(
        "Linear probes",
        "How well the true entries of 64 matrices are read linearly by layer. Dotted: targets shuffled; dashed: an "
        "untrained model.",
        f"interp-run probe --ckpt {MARKS[-1]} --target true_element --samples {SAMPLES} --plot",
        of(experiments.probe, MARKS[-1], targets="true_element", samples=SAMPLES),
    ),
}


def page() -> str:
    """Returns docs/gallery.md."""
    parts = [
        "# Gallery",
        "Figures of the library and of the commands, drawn from the shipped models by `docs/scripts/gallery.py`. "
        "[Figures](plots.md) says how to draw, title and save your own.",
    ]
    for name, shown in FIGURES.items():
        parts += [f"## {shown.title}", shown.shows, f"`{shown.makes}`"]
        parts.append(f"![{shown.title}](images/gallery/{name}.png)")
    return "\n\n".join(parts) + "\n"


def main(names: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        for name in names or FIGURES:
            figure = untitled(FIGURES[name].draw())
            written = Page("", [Figure(figure)]).write(Path(folder) / f"{name}.html")
            # Maps side by side may need more than the page's width, where a reader scrolls.
            width = max(WIDTH, least_readable_width(figure) + MARGIN)
            window = browser.new_page(
                viewport={"width": width, "height": 700}, device_scale_factor=FIGURES[name].scale
            )
            window.set_default_timeout(120_000)
            window.goto(written.as_uri(), wait_until="domcontentloaded")
            window.wait_for_selector(".main-svg")
            window.add_style_tag(content=".modebar, .updatemenu-container, h1 { display: none !important; }")
            target = FOLDER / f"{name}.png"
            window.locator(".plot").screenshot(path=target)
            window.close()
            print(target, target.stat().st_size, "bytes", flush=True)
        browser.close()
    (DOCS / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
