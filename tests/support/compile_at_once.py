"""A decorator of functions that run on ranks and call sizes again."""

from __future__ import annotations

import math
from unittest import mock

from weft.symm import compilations

at_once = mock.patch.multiple(compilations, MOST_SHARE=math.inf, LEAST_CALLS=0)
"""In the decorated function the second call of a size compiles it, whatever time that takes."""
