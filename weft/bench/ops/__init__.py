"""One file for each operator with its own baselines: its presets, inputs, baselines, and tables."""
