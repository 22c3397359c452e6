import stat

import pytest

from hf_lgelu.models.whole_folder import whole_folder


def write_half(target, **options):
    with whole_folder(target, **options) as new:
        (new / "file").write_text("x")
        raise OSError("no such luck")


def test_it_is_there_when_the_block_ends_well(tmp_path):
    target = tmp_path / "a" / "b"
    with whole_folder(target) as new:
        (new / "file").write_text("x")
        assert not target.exists()
        assert new.parent == target.parent  # on the same disk: renaming does not copy
    assert (target / "file").read_text() == "x"
    assert [path.name for path in target.parent.iterdir()] == ["b"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_nothing_is_there_after_an_error(tmp_path):
    with pytest.raises(OSError, match="no such"):
        write_half(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_an_error_keeps_what_was_there(tmp_path):
    target = tmp_path / "b"
    target.mkdir()
    (target / "config.json").write_text("old")
    with pytest.raises(OSError, match="no such"):
        write_half(target, overwrite=True)
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_failing_exchange_puts_the_old_folder_back(tmp_path, monkeypatch):
    import os

    target = tmp_path / "b"
    target.mkdir()
    (target / "config.json").write_text("old")
    replace = os.replace

    def fail_second(source, to):
        if to == target and not (source / "config.json").exists():
            raise OSError(28, "No space left on device")
        replace(source, to)

    monkeypatch.setattr("hf_lgelu.models.whole_folder.os.replace", fail_second)
    with pytest.raises(OSError, match="No space"), whole_folder(target, overwrite=True) as new:
        (new / "file").write_text("x")
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_overwrite_replaces_all_of_it(tmp_path):
    target = tmp_path / "b"
    target.mkdir()
    (target / "config.json").write_text("old")
    with pytest.raises(FileExistsError, match="is not empty"), whole_folder(target):
        pytest.fail("the block must not run")
    with whole_folder(target, overwrite=True) as new:
        (new / "file").write_text("x")
    assert [path.name for path in target.iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_an_empty_folder_is_taken_and_a_file_is_not(tmp_path):
    (tmp_path / "b").mkdir()
    with whole_folder(tmp_path / "b") as new:
        (new / "file").write_text("x")
    assert (tmp_path / "b" / "file").exists()
    with pytest.raises(NotADirectoryError, match="is a file"), whole_folder(tmp_path / "b" / "file"):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("target", [".", "..", "../b"])
def test_the_current_folder_is_not_replaced(target, tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("mine")
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ValueError, match="is the current folder or has it inside"):
        write_half(target, overwrite=True)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_folder_of_other_things_is_not_replaced(tmp_path):
    target = tmp_path / "runs"
    (target / "one").mkdir(parents=True)
    (target / "one" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"holds no config\.json: it is no model"):
        write_half(target, overwrite=True)
    assert (target / "one" / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
