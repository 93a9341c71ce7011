"""`weft bench never-slower`: compare weft, which chooses its schedules, with hand-written serial calls, on random shapes.

- options: the command line
- draw: shapes, a function of seed, operator and number, within the limits of the machine
- measure: one shape on all ranks, a row for each mode
- run: all shapes except those already in the file; then again the shapes where weft was slower
- judge: the verdict on the rows
- page: the summary for the terminal, tables and a sentence for documents
"""
