"""What scripts/bench_convert.py measures: networks of known size, with random weights, converted to ReLU."""
