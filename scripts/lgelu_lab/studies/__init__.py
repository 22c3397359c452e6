"""Running benchmarks, recording each run, and reporting what the records hold."""
