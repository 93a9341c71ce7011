"""Faults injected on purpose: `python -m tests.chaos --help`.

`draw` draws the injections, `trial` starts the ranks and sends signals, and `jobs` is a rank's program. It uses `work`
(operators and their right results) and `faults` (what goes wrong on a rank). `verdict` judges the traces. `campaign`
runs many of them.
"""
