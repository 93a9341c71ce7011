"""A file for each operator: its presets, inputs, baselines, and what its tables say."""
