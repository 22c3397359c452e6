import os
import signal
import stat

import pytest
from matplotlib.figure import Figure

from hf_lgelu.files import save_picture, whole_file, whole_folder


def model_folder(place, name="b"):
    (place / name).mkdir(parents=True)
    (place / name / "config.json").write_text("old")
    return place / name


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(target, error=None, **options):
    with whole_folder(target, **options) as new:
        (new / "file").write_text("x")
        if error is not None:
            raise error


def test_it_is_there_when_the_block_ends_well(tmp_path):
    target = tmp_path / "a" / "b"
    with whole_folder(target) as new:
        (new / "file").write_text("x")
        (new / "file").chmod(0o600)  # as safetensors leaves its files
        assert not target.exists()
        assert new.parent.parent == target.parent  # on the same disk: renaming does not copy
    assert (names(target), names(target.parent)) == (["file"], ["b"])
    assert [stat.S_IMODE(path.stat().st_mode) for path in (target, target / "file")] == [0o755, 0o644]


def test_nothing_is_there_after_an_error_and_an_empty_folder_is_taken(tmp_path):
    with pytest.raises(OSError, match="no such"):
        fill(tmp_path / "b", OSError("no such luck"))
    assert names(tmp_path) == []
    (tmp_path / "b").mkdir()
    fill(tmp_path / "b")
    assert (names(tmp_path / "b"), names(tmp_path)) == (["file"], ["b"])


def test_overwrite_replaces_all_of_it_or_nothing(tmp_path):
    target = model_folder(tmp_path)
    for error in (OSError("no such luck"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fill(target, error, overwrite=True)
        assert (names(target), names(tmp_path)) == (["config.json"], ["b"])
    fill(target, overwrite=True)
    assert (names(target), names(tmp_path)) == (["file"], ["b"])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_between_the_renames_puts_the_old_folder_back(error, tmp_path, monkeypatch):
    target, replace = model_folder(tmp_path), os.replace

    def failing(source, to):
        if source.name == "new":
            raise error
        replace(source, to)

    monkeypatch.setattr("hf_lgelu.files.os.replace", failing)
    with pytest.raises(type(error)):
        fill(target, overwrite=True)
    assert ((target / "config.json").read_text(), names(tmp_path)) == ("old", ["b"])


def test_a_process_killed_behind_its_first_rename_leaves_a_model_in_sight(tmp_path, monkeypatch):
    target, replace = model_folder(tmp_path), os.replace

    def killed(*paths):
        replace(*paths)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("hf_lgelu.files.os.replace", killed)
    child = os.fork()
    if child == 0:
        fill(target, overwrite=True)
        os._exit(0)
    os.waitpid(child, 0)
    (old,) = (path for path in tmp_path.iterdir() if path.name.startswith("b-"))
    assert (old / "config.json").read_text() == "old"


def test_who_comes_second_does_not_replace_the_first(tmp_path):
    with pytest.raises(FileExistsError, match="is not empty"), whole_folder(tmp_path / "b"):
        fill(tmp_path / "b")
    assert (names(tmp_path / "b"), names(tmp_path)) == (["file"], ["b"])


def test_a_link_to_a_folder_is_followed(tmp_path):
    target = model_folder(tmp_path)
    (tmp_path / "link").symlink_to(target)
    fill(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (names(target), names(tmp_path)) == (["file"], ["b", "link"])


def of_checkpoints(place):
    (model_folder(place) / "checkpoint-500").mkdir()
    return place / "b"


def of_git(place):
    (model_folder(place) / ".git").mkdir()
    return place / "b"


def of_other_models(place):
    model_folder(place / "b", "one")
    return place / "b"


def below_a_file(place):
    (place / "file").write_text("x")
    return place / "file" / "new" / "new"


def a_file(place):
    (place / "file").write_text("x")
    return place / "file"


REFUSED = [
    (of_checkpoints, FileExistsError, r"checkpoint-500"),
    (of_git, FileExistsError, "repository of git"),
    (of_other_models, FileExistsError, r"config\.json"),
    (below_a_file, NotADirectoryError, "nothing can be written to"),
    (a_file, NotADirectoryError, "is a file"),
    (lambda place: place.parent, ValueError, "or the current folder, or has it inside"),
    (lambda place: "/proc", ValueError, "is a mount point"),  # as `docker run -v …:/out` gives one
]


@pytest.mark.parametrize(("make", "error", "told"), REFUSED)
def test_what_is_refused_before_the_work(make, error, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=told), whole_folder(target, overwrite=True):
        pytest.fail("the work was begun")
    assert sorted(tmp_path.rglob("*")) == before


def test_where_nothing_can_be_written_the_place_that_was_given_is_named(tmp_path, monkeypatch):
    def refuse(dir, prefix, suffix):
        raise OSError(30, "Read-only file system", f"{dir}/{prefix}x{suffix}")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        fill(tmp_path / "model")
    assert (caught.value.errno, caught.value.filename) == (30, str(tmp_path / "model"))


def test_a_file_is_whole_or_not_there_and_replaces_a_link(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "note").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="is there already"), whole_file(tmp_path / "note"):
        pytest.fail("the block must not run")
    with whole_file(tmp_path / "note", overwrite=True) as new:
        new.write_text("x")
    assert not (tmp_path / "note").is_symlink()
    (tmp_path / "picture.png").symlink_to(tmp_path / "elsewhere")
    save_picture(Figure(), tmp_path / "picture.png", 50).unlink()
    assert ((tmp_path / "note").read_text(), (tmp_path / "elsewhere").read_text()) == ("x", "mine")
    assert names(tmp_path) == ["elsewhere", "note"]
    with pytest.raises(IsADirectoryError, match="is a folder"), whole_file(tmp_path, overwrite=True):
        pytest.fail("the block must not run")
    with pytest.raises(KeyError), whole_file(tmp_path / "x") as new:
        raise KeyError(new.write_text("half"))
    assert names(tmp_path) == ["elsewhere", "note"]
