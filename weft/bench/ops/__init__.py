"""Benchmarks of operators that have their own baselines. Each file has an operator's presets, inputs, baselines and tables."""
