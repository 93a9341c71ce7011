"""What every benchmark shares: clocks, checks, ceilings, records, tables, options."""
