"""`weft bench never-slower`: weft with its own choice of schedules against serial by hand, on shapes drawn from a seed.

- options: the command line
- draw: shapes, a function of seed, operator and number, within the limits of the machine
- measure: one shape on all ranks, a row for each mode
- run: all shapes except those in the file, and suspects again
- judge: verdicts on rows (below, overlapped, added microseconds)
- page: the summary for the terminal, tables and a sentence for documents
"""
