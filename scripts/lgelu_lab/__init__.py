"""The laboratory: the benchmarks, studies and measurements that the claims of hf_lgelu rest on, and their report."""
