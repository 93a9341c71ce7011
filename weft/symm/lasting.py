"""Allocation of device memory that outlives the current call.

torch may allocate from a temporary pool during a call. With `torch.compile(mode="reduce-overhead")`, first calls allocate
from the pool of CUDA graphs that are about to be captured, and these graphs overwrite the pool's memory. A temporary pool
applies to one thread only, so this module allocates on another thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def lasting(device: torch.device, make: Callable[[], T]) -> T:
    """Call `make` on another thread and return its result. There, torch allocates tensors on `device` from its permanent
    pool, even if the calling thread uses a temporary pool, as during a graph capture.

    Work that `make` enqueues is on the calling thread's current stream.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def made() -> T:
        with torch.cuda.stream(stream):
            return make()

    return _other_thread().submit(made).result()


@functools.cache
def _other_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="weft-allocates")
