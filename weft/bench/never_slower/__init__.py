"""`weft bench never-slower`: weft as it chooses, against serial by hand, on shapes that a seed draws.

options   the command line
draw      shapes: a function of seed, operator and number, within what the machine takes
measure   one shape on all ranks: a row for each mode
run       all shapes but those that a file has, and the suspects again
judge     verdicts on rows: below, overlapped, added microseconds
page      the summary for the terminal, tables and a sentence for documents
"""
