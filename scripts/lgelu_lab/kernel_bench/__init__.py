"""What scripts/bench_activation.py is made of: providers, timing, measuring, training steps, results."""
