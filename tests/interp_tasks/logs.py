"""Writes runs whose log says what it is given."""

import json


def write_run(path, validation, train=None, *, drop="loss", **sections):
    """A run folder: metric -> step -> value, of validation and of the batch trained on; sections of its config."""
    steps = sorted({step for values in validation.values() for step in values})
    last = path / "checkpoints" / f"{steps[-1]:08d}"
    last.mkdir(parents=True)
    (last / "meta.json").write_text("{}")
    config = {
        "train": {"seed": 0, "eval_samples": 512, "steps": steps[-1]} | sections.pop("train_config", {})
    }
    described = {"format": 1, "config": config | sections, "drop_metric": {"name": drop, "direction": "down"}}
    (path / "run.json").write_text(json.dumps(described))
    splits = {"validation": validation} | ({"train": train} if train else {})
    lines = (
        {"step": step}
        | {split: {name: of[step] for name, of in each.items()} for split, each in splits.items()}
        for step in steps
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)
