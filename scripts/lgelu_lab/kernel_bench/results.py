"""Measured rows in a CSV file, each with what it was measured on; a rerun finds what is there."""

import importlib.metadata
import os
from collections.abc import Mapping

import torch

from hf_lgelu.environment import hardware, package_versions
from lgelu_lab.rows_file import RowsFile
from lgelu_lab.studies.checkout import last_commit

Cells = dict[str, str]

CASE = ("provider", "mode", "size", "memory_format", "elements", "dtype", "hardness", "threads", "allocator")
"""What was asked for: one provider in one mode on one input. `hardness` is λ, empty where there is none; `allocator` is
"keep" or "stock" (see the script's help), "torch" on a GPU. Rows of mode "step" are of a model's training step."""

PROVENANCE = ("device", "torch", "triton", "transformers", "hf_lgelu", "commit")
"""On what, and with which software. `commit` is the last one that changed the activation's source, with "-dirty" where
the source differs from it."""

NUMBERS = (
    *("milliseconds_q20", "milliseconds_median", "milliseconds_q80", "ratio_q20", "ratio_median", "ratio_q80"),
    *("rounds", "repetitions", "saved_bytes_per_element", "peak_bytes", "peak_ratio"),
)
"""Quantiles over the rounds of the time of a call, and of that time over the reference's in the same round; calls in
one timed stretch; bytes kept for the backward pass; the most held within a call, and that over the reference's."""

COLUMNS = ("provider", "kernel", *CASE[1:], "clock", *NUMBERS, *PROVENANCE)
"""`kernel` is what computed it: a row of KERNELS, "torch" or "inductor"; `clock` a key of CLOCKS."""


def number_text(value: float) -> str:
    """As it stands in the file: six digits, whole numbers as they are, nothing for NaN."""
    return "" if value != value else str(int(value)) if value == int(value) else f"{value:.6g}"


def results_file(path: str | os.PathLike, provenance: Mapping[str, str]) -> RowsFile:
    """The file of rows that were measured on one machine with one software; ValueError as of RowsFile."""
    return RowsFile(path, COLUMNS, [name for name in COLUMNS if name not in NUMBERS], provenance)


def find_provenance(device: str) -> Cells:
    """What this process would measure on; `device` is "cpu" or "cuda"."""
    versions = package_versions()
    name = torch.cuda.get_device_name() if device == "cuda" else hardware(processes=1)["cpu"]
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    commit = last_commit("hf_lgelu/activation") or "unknown"
    found = (name, versions["torch"], triton, versions["transformers"], versions.get("hf-lgelu", "unknown"), commit)
    return dict(zip(PROVENANCE, found, strict=True))
