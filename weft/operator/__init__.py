"""Operators: their specification (`spec`), and the parts made from it: calls with gradients in eager mode (`calls`) and under
torch.compile (`registration`), operators compiled for a shape (`compiled_operator`) and their `cache`, and the selection of a
schedule (`select`, `measure`)."""
