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
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_script_by_an_exception(tmp_path, number):
    script = (
        "import tempfile, time\nfrom lgelu_lab.studies.folder import stop_on_signals\nstop_on_signals()\n"
        f"with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        "    print('there', flush=True)\n    time.sleep(60)\n"
    )
    other = in_another_process(script)
    assert other.stdout.readline() == "there\n"
    assert len(list(tmp_path.iterdir())) == 1
    other.send_signal(number)
    assert other.wait(timeout=30) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_sweeping_takes_what_a_killed_writer_left_and_nothing_else(tmp_path):
    kept = {"record.json", "other.json", ".hidden", ".other.json-abc.tmp"}
    for name in (*kept, ".record.json-abc.tmp"):
        (tmp_path / name).write_text("{}")
    sweep(tmp_path / "record.json")
    assert {path.name for path in tmp_path.iterdir()} == kept
