"""Faults injected on purpose: `python -m tests.chaos --help`.

`draw` says what is injected, `trial` starts the ranks and sends signals, `jobs` is what a rank does, with `work` (operators and
their right results) and `faults` (what goes wrong on a rank), and `verdict` judges the traces. `campaign` runs many of them.
"""
