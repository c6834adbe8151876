"""What a sweep over processes has measured, kept in a folder: whole lines or none, and the table of one process."""

import json
import math
import os
import subprocess
import sys
import textwrap

import pandas as pd
import pytest
import torch

from circuits import ablate, heads, sweep
from interp_tasks import UserError
from interp_tasks.grids import Done

FEW = {"draws": 20, "flips": 20}
#: What workers of another process import: a model, and a metric.
MODULE = """
    import warnings
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    def build():
        torch.manual_seed(0)
        sizes = dict(n_layers=2, n_heads=2, d_head=4, d_model=8, d_mlp=16, n_ctx=5, d_vocab=7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return HookedTransformer(HookedTransformerConfig(**sizes, act_fn="relu", device="cpu", seed=0))

    def squares(output, rows):
        return output.double().square().mean((1, 2)) + rows.double().mean(1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "units_of_a_sweep.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("units_of_a_sweep")
    del sys.modules["units_of_a_sweep"]


def test_a_mapping_that_outlives_its_process(tmp_path):
    with Done(tmp_path / "a" / "b") as done:
        assert not done
        assert list(done) == []
        done["one"] = {"x": [0.1, math.inf, 1e-320], "null": None}
        done["two"] = {"x": math.nan}
        done["one"] = {"x": [0.2]}
        assert done["one"] == {"x": [0.2]}
    with Done(tmp_path / "a" / "b") as done:
        assert list(done) == ["one", "two"]
        assert "three" not in done
        assert done["one"] == {"x": [0.2]}
        assert math.isnan(done["two"]["x"])
        with pytest.raises(UserError, match="what is measured stays"):
            del done["one"]
        with pytest.raises(KeyError):
            done["three"]


def test_what_a_killed_process_leaves(tmp_path):
    """A process is killed between the bytes of a line: the lines before it are there, and later ones can be added."""
    script = f"""
        import os
        from interp_tasks.grids import Done
        done = Done({str(tmp_path)!r})
        done["one"] = [1.5]
        write = os.write
        def torn(descriptor, content):
            write(descriptor, content[:9])
            os.kill(os.getpid(), 9)
        os.write = torn
        done["two"] = [2.5]
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)]).returncode == -9
    assert (tmp_path / "units.jsonl").read_bytes().count(b'"key"') == 2
    with Done(tmp_path) as done:
        assert dict(done) == {"one": [1.5]}
        done["two"] = [3.5]
    with Done(tmp_path) as done:
        assert dict(done) == {"one": [1.5], "two": [3.5]}


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    with Done(tmp_path) as done:
        done["one"] = [1.5]
        write = os.write

        def full(descriptor, content):
            write(descriptor, bytes(content)[:5])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(UserError, match=r"cannot write .*No space left"):
                done["two"] = [2.5]
        done["three"] = [3.5]
        assert dict(done) == {"one": [1.5], "three": [3.5]}
    lines = (tmp_path / "units.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["one", "three"]


def test_faults_are_one_line(tmp_path):
    with Done(tmp_path), pytest.raises(UserError, match=r"being written by another process .*another folder"):
        Done(tmp_path)
    (tmp_path / "units.jsonl").write_text(
        '{"key": "one", "measured": 1}\n{"ke\n{"key": "two", "measured": 2}\n'
    )
    with pytest.raises(UserError, match=r"units.jsonl, line 2: damaged"):
        Done(tmp_path)
    (tmp_path / "units.jsonl").write_text('{"key": "one", "measured": 1}\n')
    with Done(tmp_path) as done:  # the lock of one that failed to open is free
        assert dict(done) == {"one": 1}
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        Done(tmp_path / "file" / "folder")


@pytest.mark.filterwarnings("ignore")
def test_dask_gives_the_table_of_one_process(tmp_path, module):
    """Processes of a cluster; the second call finds all in the folder, and needs none."""
    distributed = pytest.importorskip("distributed")
    model = module.build()
    tokens = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(0))
    given = {"metric": module.squares, "batch": tokens, "chunk": 10, **FEW}
    variants = ablate.each(ablate.zero, heads("all", model)) | {"mean": ablate.mean("1.0", tokens.flip(0))}
    alone = sweep(model, tokens, variants, **given)
    split = {"examples": 2, "variants": 3}
    with Done(tmp_path / "kept") as done:
        with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            client.run(sys.path.insert, 0, str(tmp_path))
            pids = set(client.run(os.getpid).values())
            executor = client.get_executor(pure=False)
            found = sweep(module.build, tokens, variants, executor=executor, split=split, done=done, **given)
        assert os.getpid() not in pids
        assert len(pids) == 2
        assert len(done) == 3 * 2
    with Done(tmp_path / "kept") as done:
        again = sweep(module.build, tokens, variants, executor=_Nobody(), split=split, done=done, **given)
    for table in (found, again):
        pd.testing.assert_frame_equal(table.frame, alone.frame, check_exact=True)
        pd.testing.assert_frame_equal(table.baseline, alone.baseline, check_exact=True)


class _Nobody:
    def submit(self, *arguments):
        raise AssertionError("all was done")
