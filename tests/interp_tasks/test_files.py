"""Files of others: what cannot be read is one line, and none but ours is written to."""

import lzma
import os

import pytest

from interp_tasks.checkpoints.run_reader import METRICS_FILE, parse_json, read_metrics
from interp_tasks.errors import UserError
from interp_tasks.file_io import acquire_folder_lock, check_regular_file


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"\.lock is a link or no regular file"):
        acquire_folder_lock(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("content", [lzma.compress(b"{}\n" * 100)[:-20], b"no xz"])
def test_a_log_that_cannot_be_decompressed(tmp_path, content):
    (tmp_path / f"{METRICS_FILE}.xz").write_bytes(content)
    with pytest.raises(UserError, match="cannot be decompressed"):
        read_metrics(tmp_path)


def test_nan_is_no_json():
    with pytest.raises(ValueError, match="NaN is no number"):
        parse_json(b'{"attn_scale": NaN}')


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_may_never_end_is_not_read(tmp_path, make):
    file = tmp_path / "file"
    make(file)
    with pytest.raises(UserError, match=r"--tokens .*file: it is (a folder|no regular file)"):
        check_regular_file(file, "--tokens")
