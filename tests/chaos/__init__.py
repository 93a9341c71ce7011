"""Tests that inject faults into running ranks, called chaos tests. Usage: `python -m tests.chaos --help`.

An injection is one run of a few ranks in which one fault is injected. `draw` draws the injections. `trial` starts the
ranks of one injection and sends signals. `jobs` is the program of a rank; it uses `work` (operators and their right
results) and `faults` (what goes wrong on a rank). `verdict` judges what the ranks recorded. `campaign` runs many
injections.

`series` makes random calls without faults, many in a row (`series_calls`).
"""
