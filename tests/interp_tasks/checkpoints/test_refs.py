"""The grammar of REFs, on run folders whose checkpoints are little more than names."""

import json
import lzma
from pathlib import Path

import pytest

from interp_tasks.checkpoints import ResolvedCheckpoint, checkpoint_refs, find_marks, resolve, zoo_names
from interp_tasks.checkpoints.checkpoint_refs import find_run_folder
from interp_tasks.checkpoints.run_reader import (
    CLOCK_FILE,
    FORMAT,
    METRICS_FILE,
    read_clock,
    read_metrics,
    with_own_sha256,
)
from interp_tasks.checkpoints.steps_around_drop import detect_drop_of_run
from interp_tasks.errors import UserError

STEPS = [0, 1, 2, 4, 100, 200, 300, 1000, 2000, 3000, 4000]


def write_checkpoint(folder, step):
    meta = {"format": FORMAT, "step": step, "task": None, "model": {}, "frozen": [], "training_state": None}
    more = {"weights": {"dtype": "float32"}, "metrics": {"loss": 1.0}, "saved_at": "2024-01-01"}
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps(with_own_sha256({**meta, **more})))
    return folder


def write_run(run, steps=STEPS, **described):
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"format": 1, "config": {}, **described}))
    for step in steps:
        write_checkpoint(run / "checkpoints" / f"{step:08d}", step)
    return run


def write_metrics(run, onset=1000, end=2000, section="validation"):
    """A level, a straight fall, a level; logged every 20 steps."""
    lines = []
    for step in range(0, 4001, 20):
        value = 1.0 if step < onset else 0.1 if step > end else 1 - 0.9 * (step - onset) / (end - onset)
        lines.append(json.dumps({"step": step, section: {"mse": value}, "train": {"mse": 0.0}}) + "\n")
        lines.append(json.dumps({"step": step + 10, "train": {"mse": 0.0}}) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines) + '{"step": 4')


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Run folders ``x``, ``seeds/seed-{1,2,10}``, a lone checkpoint, a folder of notes and a zoo."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "x")
    for seed in (1, 2, 10):
        write_run(tmp_path / "seeds" / f"seed-{seed}", [0, 100 * seed])
    (tmp_path / "seeds" / "notes").mkdir()
    write_checkpoint(tmp_path / "lone", 77)
    write_run(tmp_path / "fresh", [])
    (tmp_path / "model.pt").touch()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").touch()
    write_run(tmp_path / "package" / "small", [0, 5])
    write_run(tmp_path / "package" / "large", [0, 50])
    (tmp_path / "package" / "__pycache__").mkdir()
    monkeypatch.setattr(checkpoint_refs, "ZOO_FOLDER", tmp_path / "package")
    return tmp_path


def steps_of(ref):
    return [each.step for each in resolve(ref)]


def complaint(ref):
    with pytest.raises(UserError) as caught:
        resolve(ref)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("selector", "steps"),
    [
        ("", [4000]),
        ("@last", [4000]),
        ("@all", STEPS),
        ("@0004", [4]),
        ("@200, 100", [200, 100]),
        ("@100,100,last,4000", [100, 4000]),
        ("@0:4000:1000", [0, 1000, 2000, 3000, 4000]),
        ("@100:300:100,last", [100, 200, 300, 4000]),
        ("@0::2000", [0, 2000, 4000]),
        ("@:", STEPS),
        ("@1000:", [1000, 2000, 3000, 4000]),
        ("@:2", [0, 1, 2]),
        ("@3:250", [4, 100, 200]),
        ("@" + ",".join(["4"] * 200), [4]),  # longer than a name may be
    ],
)
def test_selectors(place, selector, steps):
    assert steps_of("x" + selector) == steps


def test_what_is_resolved(place):
    (found,) = resolve("x@100")
    assert found == ResolvedCheckpoint(Path("x"), "x", 100, Path("x/checkpoints/00000100"), "x@100", "x@100")
    assert resolve("x/@100") == resolve("./x@100") == [found]
    assert resolve(found.ref) == [found]
    assert resolve(f"{place}/x@100")[0].ref == f"{place}/x@100"


def test_a_checkpoint_folder(place):
    (lone,) = resolve("lone")
    assert lone == ResolvedCheckpoint(None, None, 77, Path("lone"), "lone", "lone")
    assert resolve(Path("lone")) == [lone]
    assert resolve("x/checkpoints/00000100") == resolve("x@100")
    assert complaint("lone@77") == "'lone@77': lone is one checkpoint, not a run: leave out the @"


def test_globs_take_runs_in_natural_order(place):
    for glob, seeds in (
        ("seeds/seed-*@last", (1, 2, 10)),
        ("seeds/*", (1, 2, 10)),
        ("seeds/seed-[12]", (1, 2)),
    ):
        assert [each.ref for each in resolve(glob)] == [f"seeds/seed-{seed}@{100 * seed}" for seed in seeds]
    assert len(resolve("**/seed-*@all")) == 6
    assert [each.step for each in resolve("x/checkpoints/*")] == STEPS
    assert complaint("seeds/run-*@last") == "no run or checkpoint folder matches 'seeds/run-*'"
    assert "seeds/seed-2 has no checkpoint at step 100: the nearest are 0 and 200" in complaint("seeds/*@100")


def test_names_that_look_like_grammar(place):
    write_run(place / "a@b", [9])
    write_run(place / "c[1]", [8])
    assert steps_of("a@b") == steps_of("a@b@9") == [9]
    assert resolve("a@b")[0].ref == "a@b@9"
    assert steps_of("c[1]@8") == steps_of("c[1]") == [8]


def test_the_zoo(place):
    assert zoo_names() == ["large", "small"]
    (found,) = resolve("zoo:small@last")
    assert (found.ref, found.run_name, found.step) == ("zoo:small@5", "zoo:small", 5)
    assert found.path == place / "package" / "small" / "checkpoints" / "00000005"
    assert resolve("zoo:small") == [found]
    assert steps_of("zoo:large@all") == [0, 50]
    assert complaint("zoo:medium@last") == "no zoo:medium; interp-run runs zoo lists what ships"
    assert complaint("zoo:smal@last").startswith("no zoo:smal: the closest are zoo:small")
    for outside in (f"zoo:{place / 'x'}", "zoo:../x", "zoo:small/"):
        assert complaint(outside).startswith(f"no {outside}")


def test_a_pattern_of_the_zoo_leaves_out_runs_that_ship_their_log_alone(place):
    write_run(place / "package" / "log-1", [])
    write_run(place / "package" / "log-2", [])
    assert [each.ref for each in resolve("zoo:*@last")] == ["zoo:large@50", "zoo:small@5"]
    alone = "ships its log alone: train it by its recipe for checkpoints"
    assert complaint("zoo:log-2") == f"zoo:log-2 {alone}"
    assert complaint("zoo:log-*") == f"zoo:log-1 {alone}"


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("fresh", "fresh has no checkpoints yet"),
        ("model.pt", "is a file, no run or checkpoint folder: interp-run runs import model.pt --out RUN"),
        ("llama", "interp-run runs import llama --out RUN"),
        ("", "an empty checkpoint reference"),
        ("@last", "names no run before the @"),
        ("seedz@last", "did you mean 'seeds'?"),
        ("x:", "no run or checkpoint folder 'x:'"),
        ("seeds@last", "seeds is no run and no checkpoint folder"),
        ("x@", "no step ''"),
        ("x@lst", "did you mean @last?"),
        ("x@-1", "no step '-1'"),
        ("x@²", "no step '²'"),
        ("x@1,,2", "no step ''"),
        ("x@100:0", "ends before it begins"),
        ("x@0:100:0", "has steps of 0"),
        ("x@5:50", "x stores no step in 5:50: it has 0, 1, 2, ... 3000, 4000: 11 in all"),
        ("x@150", "x has no checkpoint at step 150: the nearest are 100 and 200"),
        ("x@900000::100", "x stores no step in 900000::100: it has "),
        ("x@9999", "x has no checkpoint at step 9999: the nearest are 4000 (of"),
        (f"x@0:{10**18}:1", "x has no checkpoint at step 3: the nearest are 2 and 4"),
        ("x@post", "declares no drop_metric"),
    ],
)
def test_complaints(place, ref, expected):
    assert expected in complaint(ref)


def test_marks(place):
    run = write_run(place / "dropped", STEPS, drop_metric={"name": "mse", "direction": "down"})
    write_metrics(run, onset=1000, end=2200)
    assert find_marks(run) == {"pre": 300, "onset": 1000, "end": 3000, "post": 4000}
    assert steps_of("dropped@pre,onset,end,post") == [300, 1000, 3000, 4000]


def test_marks_never_fall_on_the_wrong_side(place):
    metric = {"name": "mse", "direction": "down"}
    coarse = write_run(place / "coarse", [0, 3000, 4000], drop_metric=metric)
    write_metrics(coarse)
    assert find_marks(coarse) == {"pre": 0, "onset": 0, "end": 3000, "post": 4000}
    sparse = write_run(place / "sparse", [0, 900, 3000, 4000], drop_metric=metric)
    write_metrics(sparse)
    assert find_marks(sparse)["pre"] == 900  # 0 is nearer to 250, but an untrained model says little
    late = write_run(place / "late", [3000, 4000], drop_metric=metric)
    write_metrics(late)
    drop = detect_drop_of_run(late, json.loads((late / "run.json").read_text()), "late")
    span = f"(steps {drop.onset} to {drop.end})"
    assert f"late has no checkpoint before its drop {span}: the first is @3000" in complaint("late@pre")
    # Its end is there: a mark needs a checkpoint on its own side.
    assert [step for mark in ("end", "post") for step in steps_of(f"late@{mark}")] == [3000, 4000]
    with pytest.raises(UserError, match="late has no checkpoint before its drop"):
        find_marks(late)
    assert find_marks(late, needed=["post"]) == {"end": 3000, "post": 4000}
    early = write_run(place / "early", [0, 500], drop_metric=metric)
    write_metrics(early)
    assert f"early has no checkpoint after its drop {span}: the last is @500" in complaint("early@end")
    assert steps_of("early@onset") == [500]


def test_no_drop_no_marks(place):
    run = write_run(place / "flat", STEPS, drop_metric={"name": "mse", "direction": "down"})
    assert "metrics.jsonl is missing" in complaint("flat@post")
    write_metrics(run, onset=9999, end=99999)
    told = complaint("flat@post")
    assert "flat shows no drop in mse up to step 4000: it does not fall, yet; train longer" in told
    assert "Give steps, or @last" in told
    alone = write_run(place / "package" / "log", [], drop_metric={"name": "mse", "direction": "down"})
    write_metrics(alone, onset=9999, end=99999)
    assert "It has no checkpoints; runs drops and runs curve read its log" in complaint("zoo:log@post")
    write_metrics(run, section="test")
    assert "logs no validation mse" in complaint("flat@post")
    (run / "metrics.jsonl").write_text('{"step": 1, "validation": {"mse": "low"}}\n')
    assert "logs no validation mse" in complaint("flat@post")


def test_a_compressed_log_is_read_like_another(place):
    run = write_run(place / "packed", STEPS, drop_metric={"name": "mse", "direction": "down"})
    write_metrics(run)
    plain, marks = read_metrics(run), find_marks(run)
    assert read_clock(run) == {}
    (run / f"{METRICS_FILE}.xz").write_bytes(lzma.compress((run / METRICS_FILE).read_bytes()))
    (run / METRICS_FILE).write_text('{"step": 7}\n')
    assert [line["step"] for line in read_metrics(run)] == [7], "the one that is written to goes first"
    (run / METRICS_FILE).unlink()
    assert (read_metrics(run), find_marks(run)) == (plain, marks)
    (run / f"{CLOCK_FILE}.xz").write_bytes(lzma.compress(b'{"step": 4, "seconds": 1.5}\n'))
    assert read_clock(run) == {4: 1.5}
    for log in (METRICS_FILE, CLOCK_FILE):
        whole = (run / f"{log}.xz").read_bytes()
        (run / f"{log}.xz").write_bytes(whole[:40] + b"x" + whole[41:])
    assert "metrics.jsonl.xz is mangled: " in complaint("packed@pre")
    assert read_clock(run) == {}


def test_published_steps_stand_at_paper_scale(place):
    metric = {"name": "mse", "direction": "down"}
    published = {"pre": 4, "onset": 100, "end": 300, "post": 3000}
    write_run(place / "paper", STEPS, drop_metric=metric, preset="paper", published_drop=published)
    assert find_marks(place / "paper") == published
    assert steps_of("paper@pre,post") == [4, 3000]
    run = write_run(place / "partly", STEPS, drop_metric=metric, preset="paper", published_drop={"pre": 4})
    write_metrics(run)
    assert (find_marks(run)["pre"], find_marks(run)["onset"]) == (4, 1000)


def test_a_folder_of_shipped_runs_is_named_with_what_is_in_it():
    said = (
        r"^zoo:matrix-completion-7x7-seeds is a folder of 4 runs \(seed-1, seed-2, seed-3, seed-4\): name one, as "
        r"zoo:matrix-completion-7x7-seeds/seed-1, or all, zoo:matrix-completion-7x7-seeds/\*$"
    )
    with pytest.raises(UserError, match=said):
        find_run_folder("zoo:matrix-completion-7x7-seeds")
