"""What lies in the folder of the downstream measurements."""

import os
from collections.abc import Sequence
from pathlib import Path

from lgelu_lab.measurements.records import MeasurementRecord, read_measurements
from lgelu_lab.studies.records import RECORD_FILE, RunRecord, read_records


def read_downstream(
    folder: str | os.PathLike, records: Sequence[RunRecord] = ()
) -> tuple[list[RunRecord], list[MeasurementRecord]]:
    """(records and those of the runs below `folder`, each once; the measurements below `folder`).

    Raises FileNotFoundError where there is no measurement.
    """
    measurements = read_measurements(folder)
    if not measurements:
        raise FileNotFoundError(
            f"no measurement below {folder}; make them with: python scripts/downstream.py --runs RUNS "
            f"--output_dir {folder}"
        )
    networks = read_records(folder) if any(Path(folder).rglob(RECORD_FILE)) else []
    return [*records, *(record for record in networks if record not in records)], measurements
