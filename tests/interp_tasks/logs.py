"""Writes runs whose log says what it is given."""

import json

from interp_tasks.checkpoints import save_checkpoint


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


def write_run_of_task(folder, task, settings, steps=(10, 40), before=0.1, after=0.01):
    """A run folder of untrained checkpoints, and a log whose metrics go from one number to another at step 20."""
    for step in steps:
        save_checkpoint(folder / f"checkpoints/{step:08d}", task.build_model(step, settings), task, step=step)
    config = {
        "task": {"name": task.name, **task.model_dump(mode="json")},
        "model": settings.model_dump(mode="json"),
        "train": {"steps": 40, "seed": 0, "eval_samples": 8},
    }
    drop = {"name": task.drop_metric.name, "direction": task.drop_metric.direction}
    (folder / "run.json").write_text(json.dumps({"format": 1, "config": config, "drop_metric": drop}))
    values = (dict.fromkeys(task.metric_names, before if step < 20 else after) for step in range(41))
    lines = ({"step": step, "validation": each, "train": each} for step, each in enumerate(values))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)
