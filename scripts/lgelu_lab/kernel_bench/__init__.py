"""What scripts/bench_activation.py is made of: cases, providers, timing, memory, results, figure and table."""
