"""Files that are whole or not there at all."""

import os
import stat

import pytest

from rljax.files import write_whole


def test_it_is_whole_with_its_folders_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    assert write_whole(path, b"one") == path
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]
    (tmp_path / "other").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode  # as the umask has it


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to("there/file")
    write_whole(tmp_path / "link", b"one")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "file").read_bytes() == b"one"


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    write_whole("/dev/null", b"one")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"one")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_one_that_fails_leaves_the_old_one(tmp_path, monkeypatch, call):
    write_whole(tmp_path / "file", b"one")
    monkeypatch.setattr(f"os.{call}", lambda *of: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]
