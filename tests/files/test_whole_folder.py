import itertools
import os
import signal
import stat
import sys

import pytest

from hf_lgelu.files import whole_folder as module
from hf_lgelu.files.whole_file import whole_file
from hf_lgelu.files.whole_folder import whole_folder


def write_half(target, **options):
    with whole_folder(target, **options) as new:
        (new / "file").write_text("x")
        raise OSError("no such luck")


def test_it_is_there_when_the_block_ends_well(tmp_path):
    target = tmp_path / "a" / "b"
    with whole_folder(target) as new:
        (new / "file").write_text("x")
        assert not target.exists()
        assert new.parent.parent == target.parent  # on the same disk: renaming does not copy
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


def test_the_checkpoints_of_a_training_are_not_replaced(tmp_path):
    target = tmp_path / "run"
    (target / "checkpoint-500").mkdir(parents=True)
    (target / "config.json").write_text("{}")
    with (
        pytest.raises(FileExistsError, match=r"checkpoints of a training \(checkpoint-500\)"),
        whole_folder(target, overwrite=True),
    ):
        pass
    assert sorted(path.name for path in target.iterdir()) == ["checkpoint-500", "config.json"]


@pytest.fixture(params=["in one step", "in two steps"])
def exchange(request, monkeypatch):
    """As the system exchanges folders, and as where it cannot."""
    if request.param == "in two steps":
        monkeypatch.setattr(module, "_exchanged", lambda one, other: False)
    return request.param


def test_a_failing_exchange_puts_the_old_folder_back(tmp_path, monkeypatch):
    target = old_model(tmp_path)
    replace = os.replace

    def fail_second(source, to):
        if to == target and not (source / "config.json").exists():
            raise OSError(28, "No space left on device")
        replace(source, to)

    monkeypatch.setattr(module, "_exchanged", lambda one, other: False)
    monkeypatch.setattr("hf_lgelu.files.whole_folder.os.replace", fail_second)
    with pytest.raises(OSError, match="No space") as failure, whole_folder(target, overwrite=True) as new:
        (new / "file").write_text("x")
    assert [path.name for path in target.iterdir()] == ["config.json"]
    (kept,) = set(tmp_path.iterdir()) - {target}  # the work of hours, perhaps: it stays, and is named
    assert f"could not take the place of {target}, and is in {kept}" in str(failure.value)
    assert [(path.name, path.read_text()) for path in kept.iterdir()] == [("file", "x")]


def test_an_interrupt_between_two_renames_loses_nothing(tmp_path, monkeypatch):
    target, replace = old_model(tmp_path), os.replace

    def interrupted(source, to):
        replace(source, to)
        if source == target:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_exchanged", lambda one, other: False)
    monkeypatch.setattr("hf_lgelu.files.whole_folder.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt), whole_folder(target, overwrite=True) as new:
        (new / "file").write_text("x")
    assert (target / "config.json").read_text() == "old"


def old_model(place):
    target = place / "b"
    target.mkdir()
    (target / "config.json").write_text("old")
    return target


def killed_at_call(number, target):
    """Write `target` in a process that is killed at the `number`-th change of the file system; whether it was."""
    child = os.fork()
    if child == 0:
        kill_at(number)
        with whole_folder(target, overwrite=True) as new:
            (new / "config.json").write_text("new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_at(number):
    """Kill this process when it is about to change the file system for the `number`-th time, and after a rename."""
    changes = itertools.count()

    def watch(event, arguments):
        writes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "ctypes.dlopen")
        writes = writes or (event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & os.O_CREAT))
        if writes and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def test_a_kill_at_any_step_leaves_the_old_folder_or_the_new(exchange, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_TO_LOCK", 0.0)  # or a folder killed before it was locked stays for a minute
    found, steps = set(), 0
    while True:
        place = tmp_path / str(steps)
        place.mkdir()
        target = old_model(place)
        killed = killed_at_call(steps, target)
        if target.exists():
            found.add((target / "config.json").read_text())
        else:
            assert exchange == "in two steps"
        with whole_folder(target, overwrite=True):  # the next start: what was left hidden is put in order
            (text,) = [path.read_text() for path in target.iterdir()]
            assert text in ("old", "new")
            assert len(list(place.iterdir())) == 2  # the target, and the new start's own
        assert [path.name for path in place.iterdir()] == ["b"]
        if not killed:
            break
        steps += 1
    assert found == {"old", "new"}
    assert steps >= 6  # the folders, the lock, the file, the exchange, the removals


def overtaken(target):
    with whole_folder(target) as slow:
        (slow / "config.json").write_text("slow")
        with whole_folder(target) as quick:
            (quick / "config.json").write_text("quick")
        assert slow.is_dir()  # a living process's folder is not swept


def test_who_comes_second_does_not_replace_the_first(tmp_path):
    with pytest.raises(FileExistsError, match="is not empty"):
        overtaken(tmp_path / "b")
    assert (tmp_path / "b" / "config.json").read_text() == "quick"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_other_hidden_folders_are_left_alone(tmp_path):
    others = [".b-notes", ".b-2-12345678.hf_lgelu", ".bc-12345678.hf_lgelu"]  # of b, b-2 and bc
    for name in others:
        (tmp_path / name / "old").mkdir(parents=True)
        os.utime(tmp_path / name, (0, 0))  # long ago, by a process that is dead
    with whole_folder(tmp_path / "b"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "b"])


def test_a_link_to_a_folder_is_followed(exchange, tmp_path):
    target = old_model(tmp_path)
    (tmp_path / "link").symlink_to(target)
    with whole_folder(tmp_path / "link", overwrite=True) as new:
        (new / "file").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in target.iterdir()] == ["file"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "link"]


def test_a_file_is_whole_or_not_there_and_replaces_a_link(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "note").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="is there already"), whole_file(tmp_path / "note"):
        pytest.fail("the block must not run")
    with whole_file(tmp_path / "note", overwrite=True) as new:
        new.write_text("x")
    assert not (tmp_path / "note").is_symlink()
    assert ((tmp_path / "note").read_text(), (tmp_path / "elsewhere").read_text()) == ("x", "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "note"]


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
    for below in ("new", "new/new"):
        taken = pytest.raises(NotADirectoryError, match="file is a file, and nothing can be written below it")
        with taken, whole_folder(tmp_path / "b" / "file" / below):
            pytest.fail("nothing can be written there")
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


def test_a_repository_is_not_replaced(tmp_path):
    """A clone from the Hub: its history would go, and its remote."""
    target = tmp_path / "model"
    (target / ".git").mkdir(parents=True)
    (target / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="is a repository of git, whose history would be lost"):
        write_half(target, overwrite=True)
    assert (target / ".git").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_of_other_things_is_not_replaced(tmp_path):
    target = tmp_path / "runs"
    (target / "one").mkdir(parents=True)
    (target / "one" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"holds no config\.json: it is no model"):
        write_half(target, overwrite=True)
    assert (target / "one" / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_where_nothing_can_be_written_the_place_that_was_given_is_named(tmp_path, monkeypatch):
    def refuse(dir, prefix, suffix):
        raise OSError(30, "Read-only file system", f"{dir}/{prefix}x{suffix}")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    target = tmp_path / "model"
    wanted = "Read-only file system: nothing can be written to"
    with pytest.raises(OSError, match=wanted) as caught, whole_folder(target):
        pass
    assert caught.value.errno == 30
    assert str(caught.value.filename) == str(target)


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="needs a mount point")
def test_a_mount_point_is_refused_before_the_work():
    """As `docker run -v …:/out` gives one: it can be neither renamed nor removed."""
    with pytest.raises(ValueError, match="/proc is a mount point and cannot be replaced"), whole_folder("/proc"):
        pytest.fail("the work was begun")
