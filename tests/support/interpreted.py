"""GPU kernels under Triton's interpreter, which must be selected before Triton is imported.

So each test file that uses this module is also a script. A process with TRITON_INTERPRET=1 runs the script in a fork.
The script runs its cases (`play_all`) and prints the error of each case. `wrong_in` returns these errors.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def wrong_in(file: str, names: Iterable[str]) -> dict[str, str]:
    """Run the cases `names` of `file`. Return {case: error} for the cases that failed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed here: its interpreter is what runs these cases")
    names, server = list(names), _server()
    with tempfile.TemporaryDirectory() as folder:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([file, names, folder]) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], 300)[0]:
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
        status = server.stdout.readline().strip()
        said, error = (Path(folder, name).read_text() for name in ("said", "error"))
    answers = dict(json.loads(line) for line in said.splitlines())
    # A store outside of valid memory ends the process. The first case without an answer caused it.
    crashed = f"the process ended with exit code {status} here, or before: {error}"
    return {name: text for name, text in (dict.fromkeys(names, crashed) | answers).items() if text}


def drawn(seed: int) -> tuple[torch.Generator, Callable[[int, int], int]]:
    """Return a generator, and a function that draws an integer from it: at least its first argument, below its second."""
    g = torch.Generator().manual_seed(seed)
    return g, lambda low, high: int(torch.randint(low, high, (), generator=g))


@cache
def _server() -> subprocess.Popen[str]:
    """Start a process that imports torch and Triton once, and forks for each file. The imports take longer than the
    cases of most files.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=pipe, stdout=pipe, text=True, process_group=0
    )


def _serve() -> None:
    import triton.language  # noqa: F401

    import weft.embedding  # noqa: F401

    for line in sys.stdin:
        file, names, folder = json.loads(line)
        pid = os.fork()
        if pid == 0:
            for number, name in ((1, "said"), (2, "error")):
                os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
            sys.argv = [file, *names]
            try:
                runpy.run_path(file, run_name="__main__")
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def play_all(runs: Mapping[str, Callable[[], object]]) -> None:
    """Run the cases that the command line names, and print the error of each."""
    torch.set_num_threads(1)
    _mend()
    for name in sys.argv[1:]:
        try:
            runs[name]()
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps([name, wrong]), flush=True)


def _mend() -> None:
    """Replace parts of Triton 3.6's interpreter that are wrong or slow.

    Wrong: it converts the bounds of a loop from one-element arrays, which numpy refuses from version 2.4 on. Its `dot`
    multiplies the bits of bf16 numbers as integers. In fp32, its `dot` calls BLAS. On some CPUs, BLAS sums the rows of a tile in
    different orders, but a GPU sums all rows in the same order.

    Slow: it patches the language at every call of a function, builds a dict at every look-up of a dtype, and computes
    overflow conditions that it does not use.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    patch_language, make_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    np_dtypes: dict[str, np.dtype] = {}

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widen(operand: Any) -> np.ndarray[Any, Any]:
        data = operand.data
        if operand.dtype.scalar.is_bf16():
            data = (data.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(data, np.float64)

    def dot(self: Any, a: Any, b: Any, added: Any, *rest: Any) -> Any:
        """Multiply in fp64 and round once, so that the order of sums does not matter."""
        product = np.matmul(widen(a), widen(b)).astype(added.data.dtype)
        return interpreter.TensorHandle(product + added.data, added.dtype.scalar)

    def get_np_dtype(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = make_np_dtype(dtype)
        return np_dtypes[name]

    @cache
    def patch_once(function: Any) -> Any:
        patch_language(function)
        return interpreter._LangPatchScope()  # a scope that has nothing to restore

    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = get_np_dtype
    interpreter._patch_lang_tensor = patch
    interpreter._patch_lang = patch_once
    interpreter.InterpreterBuilder.create_dot = dot


if __name__ == "__main__":
    _serve()
