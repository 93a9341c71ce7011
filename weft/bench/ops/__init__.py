"""A file for each operator with baselines of its own: its presets, inputs, baselines, and tables."""
