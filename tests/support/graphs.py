"""Capture of calls in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")


def capture(
    call: Callable[[], R], stream: torch.cuda.Stream | None = None, mode: str = "global"
) -> tuple[torch.cuda.CUDAGraph, R]:
    """Wait for the device, and capture `call` in a CUDA graph. Return the graph, and the call's result, which replays rewrite.

    mode: as `capture_error_mode` of `torch.cuda.graph`.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        result = call()
    return graph, result
