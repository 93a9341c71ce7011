"""Operators: their specification (`spec`), and everything made from it. `calls` makes calls and gradients in eager
mode, `registration` under torch.compile. `compiled_operator` compiles an operator for a shape, `cache` keeps it, and
`select` and `measure` select its schedule."""
