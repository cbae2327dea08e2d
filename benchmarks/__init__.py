"""Benchmarks: ours, what people use today and the bound, all from one run."""
