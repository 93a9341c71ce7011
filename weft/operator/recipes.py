"""Recipes: how native code makes the tensors of a repeated call from its arguments and results (`weft.operator.replay`,
`csrc/recipe.hpp`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a public function, by position and by name."""
Place: TypeAlias = tuple[Any, ...]
"""A recipe: a nested tuple that tells native code how to make a value from a call's arguments (`csrc/recipe.hpp`)."""


class UnlikeError(Exception):
    """The error for a call that cannot be replayed. The call uses or returns a tensor that is not a view of the call's
    arguments or results.
    """


def with_division(recipe: Place, number: int) -> tuple[Place, int]:
    """Add a division to a recipe (the instructions by which native code makes a return value): divide each use of the
    call's first result by `number`. Return the new recipe, and the number of divisions in it.
    """
    if recipe == ("given", 0):
        return ("div_", recipe, number), 1
    kind, inner, *rest = recipe
    if kind in ("view", "as_strided"):
        divided, count = with_division(inner, number)
        return (kind, divided, *rest), count
    if kind in ("list", "tuple"):
        parts = [with_division(one, number) for one in inner]
        return (kind, [one for one, _ in parts]), sum(count for _, count in parts)
    return recipe, 0


class Given:
    """The tensor arguments of a call, each with its path in a recipe.

    The path ("given", 0) is the first positional argument, ("given", 1, 0) the first entry of the list that is the
    second argument, and ("named", "x") the keyword argument x.

    strided: the views of arguments that a recipe may make. True: views with any strides, which are slow in autograd.
        False: only contiguous tensors in another shape. None: only contiguous tensors in another shape that have no
        dimension of size `rows`, because the number of rows may differ in later calls.
    """

    def __init__(self, arguments: Arguments, strided: bool | None, rows: int = 0) -> None:
        self._rows = rows
        self._strided, self._tensors = strided, dict[Place, torch.Tensor]()
        by_name: dict[Place, Any] = {("named", name): value for name, value in arguments[1].items()}
        for place, value in ({("given", i): value for i, value in enumerate(arguments[0])} | by_name).items():
            if isinstance(value, torch.Tensor):
                self._tensors[place] = value
            elif isinstance(value, list | tuple):
                self._tensors |= {(*place, i): t for i, t in enumerate(value) if isinstance(t, torch.Tensor)}
        self._unused = set(self._tensors)

    @property
    def all_used(self) -> bool:
        return not self._unused

    def written(self, value: Any, *, is_scale: bool = False) -> Place:
        """Return a recipe (instructions for native code) that makes `value` from the arguments of a call. `value` is a tensor,
        a list of tensors or a constant.

        is_scale: True if `value` is a scale. A scale with one element may have any shape, so no view is needed.
        """
        if isinstance(value, torch.Tensor):
            return self._place(value, is_scale)
        if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
            return "list", [self.written(one) for one in value]
        return "constant", value

    def returned(self, value: Any, *, views: bool) -> Place:
        """Return a recipe (instructions for native code) that makes `value`, the return value of the public function, from the
        operator's results.

        views: True if `value` may contain views of results. False if the shapes of results may change: a view then
            raises `UnlikeError`, because the recipe of a view has a fixed shape.
        """
        if isinstance(value, torch.Tensor):
            place = self._place(value, False)
            if not views and place[0] in ("view", "as_strided"):
                raise UnlikeError
            return place
        if value is None:
            return "constant", None
        if type(value) not in (list, tuple):
            raise UnlikeError
        return type(value).__name__, [self.returned(one, views=views) for one in value]

    def _place(self, tensor: torch.Tensor, is_scale: bool) -> Place:
        same = [place for place, one in self._tensors.items() if one is tensor]
        fixed = self._rows > 1 and self._rows not in tensor.shape
        is_view = not same and tensor.numel() > 0 and (self._strided is not None or fixed)
        if is_view:
            at = tensor.data_ptr(), tensor.dtype, tensor.numel()
            same = [p for p, one in self._tensors.items() if (one.data_ptr(), one.dtype, one.numel()) == at]
        if len(same) != 1:
            raise UnlikeError
        place = same[0]
        self._unused.discard(place)
        base = self._tensors[place]
        if not is_view or (is_scale and base.numel() == 1 and base.dim() <= 2):
            return place
        if tensor.is_contiguous() and base.is_contiguous():
            return "view", place, tuple(tensor.shape)
        if not self._strided:
            raise UnlikeError
        return "as_strided", place, tuple(tensor.shape), tensor.stride()
