"""Rows of the benchmark: measured on a tiny input, or made by hand."""

from lgelu_lab.kernel_bench import measure, providers, results

PROVENANCE = dict(zip(results.PROVENANCE, ("abacus", "1", "", "2", "3", "abc"), strict=True))


def bench_into(path, *, threads=1, provenance=PROVENANCE):
    """Two rounds, of a stock allocator."""
    return measure.Bench("cpu", threads, "stock", 2, 0.0, results.results_file(path, provenance))


def measured(path, *, names=("relu",), hardness=(2.0,), modes=("forward", "both"), size="64", **bench):
    chosen = [providers.PROVIDERS[name] for name in (providers.REFERENCE, *names)]
    where = bench_into(path, **bench)
    return list(measure.measure_operation(size, "float32", chosen, list(hardness), list(modes), where))
