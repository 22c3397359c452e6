"""One writer at a time, whole files, and an end by signal that cleans up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lgelu_lab.studies.folder import FolderBusyError, sole_writer, sweep

SCRIPTS = Path(__file__).parents[3] / "scripts"


def in_another_process(script):
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_folder_has_one_writer_whose_death_frees_it(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom lgelu_lab.studies.folder import sole_writer\n"
        f"with sole_writer(Path({str(tmp_path / 'run')!r})):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    other = in_another_process(script)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(FolderBusyError, match="another process is writing to"), sole_writer(tmp_path / "run"):
        pytest.fail("two writers")
    other.kill()
    other.wait()
    with sole_writer(tmp_path / "run"):
        assert list((tmp_path / "run").iterdir()) == []
    with sole_writer(tmp_path / "run"):
        pass


@pytest.mark.parametrize(("number", "late"), [(signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGTERM, True)])
def test_a_signal_ends_a_script_by_an_exception_and_its_end_without_words(tmp_path, number, late):
    script = (
        "import atexit, tempfile, time\nfrom lgelu_lab.studies.folder import stopped_by_signals\n"
        "def wait():\n    print('there', flush=True)\n    time.sleep(60)\n"
        f"with stopped_by_signals(), tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        f"    {'pass' if late else 'wait()'}\n"
        "atexit.register(wait)\n"
    )
    other = in_another_process(script)
    assert other.stdout.readline() == "there\n"
    assert len(list(tmp_path.iterdir())) == (not late)
    other.send_signal(number)
    _, said = other.communicate(timeout=30)
    assert other.returncode == (-number if late else 128 + number)
    assert said == ""
    assert list(tmp_path.iterdir()) == []


def test_sweeping_takes_what_a_killed_writer_left_and_nothing_else(tmp_path):
    kept = {"record.json", "other.json", ".hidden", ".other.json-abc.hf_lgelu"}
    for name in kept:
        (tmp_path / name).write_text("{}")
    (tmp_path / ".record.json-abc.hf_lgelu").mkdir()
    sweep(tmp_path / "record.json")
    assert {path.name for path in tmp_path.iterdir()} == kept
