"""The code that all benchmarks share: clocks, checks, ceilings, records, tables, options."""
