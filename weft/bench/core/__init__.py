"""Code that all benchmarks share: timers, checks of results, measured peak rates, records, tables and options."""
