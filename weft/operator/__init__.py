"""What an operator is (`spec`), and what is made from that: calls in eager mode and under torch.compile, with gradients (`calls`);
what is kept of a shape (`prepared`); the choice of a schedule (`choosing`)."""
