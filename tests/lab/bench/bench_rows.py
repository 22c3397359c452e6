"""Rows of the benchmark: measured on a tiny input, or made by hand."""

from lgelu_lab.kernel_bench import cases, operation, providers, results

PROVENANCE = results.Provenance("abacus", "1", "", "2", "3", "abc")
PACE = operation.Pace(rounds=2, seconds=0.0)


def measure(
    path, *, names=("relu",), hardness=(2.0,), modes=("forward", "both"), size="64", threads=1, provenance=PROVENANCE
):
    case = cases.Case(cases.parse_size(size), "float32", threads, "cpu")
    file = results.ResultsFile(path, provenance)
    chosen = providers.check_providers(list(names))
    return list(operation.measure_operation(case, chosen, list(hardness), list(modes), "stock", PACE, file))


def row_of(**cells):
    """A measured row as the file has it, every cell a text."""
    filled = {
        "provider": "relu", "kernel": "torch", "mode": "both", "size": "256x256", "memory_format": "contiguous",
        "elements": "65536", "dtype": "float32", "hardness": "", "threads": "1", "allocator": "keep",
        "clock": "thread_time", "milliseconds_q20": "1", "milliseconds_median": "2", "milliseconds_q80": "3",
        "ratio_q20": "0.9", "ratio_median": "1", "ratio_q80": "1.1", "device": "abacus",
    }  # fmt: skip
    return dict.fromkeys(results.COLUMNS, "") | filled | cells
