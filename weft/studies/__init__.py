"""Measurements that answer a question of a paper, rather than compare an operator with its baselines."""
