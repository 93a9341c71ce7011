"""The options of embedding_all_to_all, as one class that the function, the module and the plan share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from weft.arguments import check_choice, checked_within
from weft.schedule.kernels import SliceOrder, SliceTransport

Transport: TypeAlias = Literal["auto", "serial", SliceTransport]
Order: TypeAlias = SliceOrder
BoundsCheck: TypeAlias = Literal["fatal", "warning", "ignore", "none"]
OutputDtype: TypeAlias = Literal["table", "fp16", "bf16"]


@dataclass(frozen=True)
class EmbeddingOptions:
    """The options that `weft.embedding_all_to_all` documents. Raises `ValueError` for an invalid value."""

    transport: Transport = "auto"
    order: Order = "remote_first"
    slice_size: int | None = None
    bounds_check: BoundsCheck = "warning"
    hash: bool = False
    outputs: int = 2
    output_dtype: OutputDtype = "table"

    def __post_init__(self) -> None:
        for name, given, legal in (
            ("transport", self.transport, get_args(Transport)),
            ("order", self.order, get_args(Order)),
            ("bounds_check", self.bounds_check, get_args(BoundsCheck)),
            ("output_dtype", self.output_dtype, get_args(OutputDtype)),
        ):
            check_choice(name, given, legal)
        if not isinstance(self.hash, bool):
            raise ValueError(f"hash={self.hash!r} must be True or False")
        if self.slice_size is not None:
            vectors = "at least 1 pooled vector, and less than 2**31"
            object.__setattr__(self, "slice_size", checked_within("slice_size", self.slice_size, 1, 2**31 - 1, vectors))
        buffers = "between 1 and 255: it is the number of result buffers of each rank"
        object.__setattr__(self, "outputs", checked_within("outputs", self.outputs, 1, 255, buffers))

    @classmethod
    def of(cls, *given: Any) -> EmbeddingOptions:
        """Return the options with these values, from a cache. Raise `ValueError` for an invalid value of any type."""
        try:
            return _known(*given)
        except TypeError:  # a value that cannot be hashed
            return cls(*given)

    @property
    def refuses_bad_ids(self) -> bool:
        """True if calls raise for an id out of range before anything is written. With `hash`, no id is out of range."""
        return self.bounds_check == "fatal" and not self.hash

    @property
    def checks_ids(self) -> bool:
        """True if lookups check ids, so that an id out of range reads a row of zeros."""
        return self.bounds_check != "none" and not self.hash

    @property
    def reports_bad_ids(self) -> bool:
        """True if a call tells the user of ids out of range, by an error or a warning."""
        return self.checks_ids and self.bounds_check != "ignore"


@lru_cache(maxsize=256, typed=True)  # typed, because 1 is refused where True is valid
def _known(*given: Any) -> EmbeddingOptions:
    return EmbeddingOptions(*given)
