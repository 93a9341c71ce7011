"""Operators: their specification, and everything that weft derives from it.

`spec` defines an operator. `calls` runs it and its backward in eager mode, and `registration` under torch.compile.
`compiled_operator` compiles it for a shape, `cache` keeps the compiled operators, and `select` and `measure` choose
their schedules.
"""
