"""Measuring what hardening makes possible: the deploy part's tools on the benchmarks' trained models."""
