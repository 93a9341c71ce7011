"""weft: collectives woven through the computation beside them."""

__version__ = "0.1.0"
