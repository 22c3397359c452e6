"""What λ-GELU is measured on: one file a data set, one table `BENCHMARKS`."""
