from pathlib import Path

import pytest
from two_processes import run_in_two_processes


@pytest.fixture(scope="package")
def two_processes(tmp_path_factory):
    """The folder of what two processes found: {process}.json of plans, {process}.pt of conversions,
    efforts-{process}.pt of steps of Adam."""
    folder = tmp_path_factory.mktemp("processes")
    run_in_two_processes(Path(__file__).parent / "two_processes_run.py", folder)
    return folder
