"""Rows of the benchmark: measured on a tiny input, or made by hand."""

from lgelu_lab.kernel_bench import measure, providers, results

PROVENANCE = dict(zip(results.PROVENANCE, ("abacus", "1", "", "2", "3", "abc"), strict=True))


def bench_into(path, *, threads=1, provenance=PROVENANCE):
    """Two rounds, of a stock allocator."""
    return measure.Bench("cpu", threads, "stock", 2, 0.0, results.results_file(path, provenance))


def measured(path, *, names=("relu",), hardness=(2.0,), modes=("forward", "both"), size="64", **bench):
    chosen = providers.check_providers(list(names))
    where = bench_into(path, **bench)
    return list(measure.measure_operation(size, "float32", chosen, list(hardness), list(modes), where))


def cells_of(**cells):
    """A measured row as the file has it, every cell a text, without its provenance."""
    filled = {
        "provider": "relu", "kernel": "torch", "mode": "both", "size": "256x256", "memory_format": "contiguous",
        "elements": "65536", "dtype": "float32", "hardness": "", "threads": "1", "allocator": "keep",
        "clock": "thread_time", "milliseconds_q20": "1", "milliseconds_median": "2", "milliseconds_q80": "3",
        "ratio_q20": "0.9", "ratio_median": "1", "ratio_q80": "1.1",
    }  # fmt: skip
    names = [name for name in results.COLUMNS if name not in results.PROVENANCE]
    return dict.fromkeys(names, "") | filled | cells
