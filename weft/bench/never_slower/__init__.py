"""`weft bench never-slower`: on random shapes, compare weft, which selects its schedules, with hand-written serial
calls.

- options: the command line
- draw: random shapes within the limits of the machine
- measure: the measurement of one shape on all ranks. The result is a row for each timing mode
- run: the measurement of all shapes that the results file lacks. Shapes on which weft was slower are measured again
- judge: the verdict on the rows
- page: the summary for the terminal, and tables and a sentence for documents
"""
