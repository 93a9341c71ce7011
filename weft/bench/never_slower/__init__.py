"""`weft bench never-slower`: weft as it chooses, against serial by hand, on shapes that a seed draws.

options   the command line
draw      shapes: a function of seed, operator and number, within what the machine takes
measure   one shape on all ranks: rows, one for each mode
run       all shapes, what a file already has, and the suspects again
judge     what rows say: below, overlapped, added microseconds
page      the summary for the terminal, tables and a sentence for documents
"""
