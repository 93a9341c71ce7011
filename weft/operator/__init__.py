"""Operators: their specification (`spec`), and what is made from it: calls in eager mode and under torch.compile, with gradients
(`calls`); preparations that are kept for a shape (`prepared`); the choice of a schedule (`choosing`)."""
