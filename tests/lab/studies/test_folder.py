"""One writer at a time, and what a killed one left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lgelu_lab.studies.folder import FolderBusyError, sole_writer, sweep

SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_a_folder_has_one_writer_whose_death_frees_it(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom lgelu_lab.studies.folder import sole_writer\n"
        f"with sole_writer(Path({str(tmp_path / 'run')!r})):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    other = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(FolderBusyError, match="another process"), sole_writer(tmp_path / "run"):
        pytest.fail("two writers")
    other.kill()
    other.wait()
    with sole_writer(tmp_path / "run"):
        assert list((tmp_path / "run").iterdir()) == []
    with sole_writer(tmp_path / "run"):
        pass


def test_sweeping_takes_what_a_killed_writer_left_and_nothing_else(tmp_path):
    kept = {"record.json", "other.json", ".hidden", ".other.json-abc.hf_lgelu"}
    for name in kept:
        (tmp_path / name).write_text("{}")
    (tmp_path / ".record.json-abc.hf_lgelu").mkdir()
    sweep(tmp_path / "record.json")
    assert {path.name for path in tmp_path.iterdir()} == kept
