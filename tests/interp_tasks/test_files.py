"""Files of others: what is read of them takes bounded time and memory, and none but ours is written to."""

import json
import lzma
import os

import pytest

from interp_tasks.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from interp_tasks.checkpoints.run_files import METRICS_FILE, parse_json, read_metrics, with_own_sha256
from interp_tasks.disk import acquire_folder_lock, check_file, read_toml
from interp_tasks.errors import UserError
from tasks import get


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"\.lock is a link or no regular file"):
        acquire_folder_lock(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lzma.compress(bytes(2 << 20)), "holds more than 1 MiB of text"),
        (lzma.compress(b"{}\n" * 100)[:-20], "cannot be decompressed"),
        (b"no xz", "cannot be decompressed"),
    ],
)
def test_a_log_is_decompressed_as_far_as_a_log_goes(tmp_path, monkeypatch, content, said):
    monkeypatch.setattr("interp_tasks.checkpoints.run_files.MAX_LOG", 1 << 20)
    (tmp_path / f"{METRICS_FILE}.xz").write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_metrics(tmp_path)


def test_a_model_without_a_scale_of_attention_is_refused(tmp_path):
    task = get("modular-addition", p=5)
    folder = save_checkpoint(tmp_path / "saved", task.build_model(0), task)
    meta = json.loads((folder / "meta.json").read_text())
    meta["model"]["attn_scale"] = 0
    (folder / "meta.json").write_text(json.dumps(with_own_sha256(meta)))
    with pytest.raises(UserError, match="attn_scale is 0"):
        load_checkpoint(folder)
    with pytest.raises(ValueError, match="NaN is no number"):
        parse_json(b'{"attn_scale": NaN}')


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_may_never_end_is_not_read(tmp_path, make):
    file = tmp_path / "file"
    make(file)
    with pytest.raises(UserError, match="file is no regular file: it should hold a grid"):
        read_toml(file, "a grid")
    with pytest.raises(UserError, match=r"--tokens .*file: it is (a folder|no regular file)"):
        check_file(file, "--tokens")


@pytest.mark.parametrize("key", ["a" + ".a" * 200, "a" + " .\ta" * 200])
@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "x = {{ {} = 1 }}"])
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(tmp_path, key, form):
    (tmp_path / "grid.toml").write_text("x = ['a.b', 1.5, \"one. two. three.\"]\n")
    assert read_toml(tmp_path / "grid.toml", "a grid")["x"][1] == 1.5
    (tmp_path / "grid.toml").write_text(form.format(key))
    with pytest.raises(UserError, match="has a key of more than 50 parts: it should hold a grid"):
        read_toml(tmp_path / "grid.toml", "a grid")
