"""Steady calls of embedding modules: native code launches the kernel with the numbers that Python computes, and refuses calls
that differ from the recorded call in more than their ids.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import tables_of

from weft import _core
from weft.embedding import EmbeddingSharding, JaggedInput, KeyedJaggedTensor
from weft.embedding.check import CheckedInput
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import plan_of
from weft.runtime.layouts import READER

kernel_module = pytest.importorskip("weft.runtime.cuda.embedding_kernel", reason="needs Triton")
CPU = torch.device("cpu")


class Program:
    """A `_core.StreamProgram` that keeps the words of its last launch."""

    fails = False

    def run(self, first: int, last: int, words: Any, streams: Any) -> None:
        if self.fails:
            raise RuntimeError("no launch")
        self.words = list(words)


def made(tables: int, batch: int, ids: int, sms: int, **options: Any) -> Any:
    """Return (kernel, its program, tables, input, checked input, memory, native call, its list of free buffers)."""
    from weft.runtime.cuda.embedding_steady import _as_jagged, launch_words

    weighted, same = options.pop("weighted"), options.pop("same")
    dims = (64,) * tables if same else tuple(8 * (1 + i % 5) for i in range(tables))
    sharding = EmbeddingSharding(tables_of(dims), (0,) * tables, 2)
    kernel = kernel_module.EmbeddingKernel(plan_of(sharding, EmbeddingOptions(**options)), 0, CPU)
    kernel._sms = sms
    program, keys = Program(), tuple(slot.feature for slot in kernel._slots)
    jagged = input_of(keys, batch, ids, weighted)
    key = (jagged.values.dtype, jagged.offsets.dtype, False, weighted, True, False, False, True, True, None)
    single = kernel._pools_single_ids(jagged)
    one, tables_of_kernel = torch.zeros(4, dtype=torch.int64), kernel_module.Tables
    addresses = tables_of_kernel.of(*[torch.zeros(2, dtype=torch.int64) for _ in range(3)])
    variant = kernel_module._Variant(object(), (), 24 * sms, tables_of_kernel.of(one, one, one), program)
    kernel._variants[kernel_module.VariantKey(*key, single)] = variant
    weights = [torch.zeros(7, dim) for dim in dims]
    sizes = (batch - batch // 2, batch // 2)
    checked = CheckedInput(tuple(range(tables)), sizes, batch)
    memory = kernel_module.RankAddresses(addresses, 1 << 20)
    record, buffers, free = torch.zeros(16, dtype=torch.int64), torch.zeros(3 * sizes[0] + 1, sum(dims)), [0, 1, 2]
    out = torch.zeros(sizes[0], sum(dims))
    executor = SimpleNamespace(_memory=memory, _last_input=None)
    native = _core.PooledCall(
        {
            **launch_words(kernel, weights, jagged, checked, memory, 60.0), "reader": READER, "executor": executor,
            "memory": memory, "owner": buffers, "free": free, "shared": set(), "outputs": 3, "out": out, "base": buffers.data_ptr(),
            "slot_bytes": memory.output_bytes, "record": record.data_ptr(), "watched": (0, 2), "rows": 0, "columns": sum(dims),
            "stream": lambda device: 0, "as_tensor": torch._C._from_dlpack, "keyed": KeyedJaggedTensor, "jagged": JaggedInput,
            "make_jagged": _as_jagged, "tables": READER.read(weights, False), "keys": jagged.keys, "checked": checked,
            "values": jagged.values, "offsets": jagged.offsets, "weights": jagged.weights,
        }
    )  # fmt: skip
    modules = {str(i): SimpleNamespace(_parameters={"weight": weight}) for i, weight in enumerate(weights)}
    return SimpleNamespace(**locals())


def input_of(keys: tuple[str, ...], batch: int, ids: int, weighted: bool = False) -> JaggedInput:
    offsets = torch.linspace(0, ids, len(keys) * batch + 1).long()
    return JaggedInput(
        keys, torch.zeros(ids, dtype=torch.int64), offsets, torch.zeros(ids) if weighted else None, batch
    )


@settings(deadline=None, max_examples=60)
@given(
    tables=st.integers(1, 40), batch=st.integers(1, 600), ids=st.integers(0, 60_000), sms=st.sampled_from([2, 108, 132]),
    weighted=st.booleans(), same=st.booleans(), transport=st.sampled_from(["direct", "put"]),
    order=st.sampled_from(["natural", "remote_first"]),
)  # fmt: skip
def test_a_native_launch_has_the_numbers_of_python(ids: int, **options: Any) -> None:
    m = made(ids=3, **options)
    jagged = m.native.read(input_of(m.keys, m.batch, ids, m.weighted), m.modules, False)
    if m.single and ids != m.tables * m.batch:  # the kernel for bags of one id would be slow
        assert jagged is None
        return
    assert jagged is not None
    m.kernel._pools_single_ids = lambda jagged: m.single  # the native call keeps its variant
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        m.kernel.launch(m.weights, jagged, m.checked, m.memory, 2, 60.0)
    by_python = m.program.words
    out = m.native.launch(jagged)
    assert m.program.words == by_python
    assert out.shape == (0, sum(m.dims))
    assert m.free == [0, 1]
    del out
    assert m.free == [0, 1, 2]


def keyed(m: Any, **given: Any) -> KeyedJaggedTensor:
    lengths = torch.ones(len(m.keys) * m.batch, dtype=torch.int64)
    ids = {"values": torch.zeros(len(lengths), dtype=torch.int64), "lengths": lengths} | given
    return KeyedJaggedTensor(ids.pop("keys", list(m.keys)), **ids)


def test_calls_that_differ_take_the_slow_path() -> None:
    m = made(tables=4, batch=6, ids=30, sms=2, weighted=False, same=True)

    def is_known(features: Any, gradients: bool = False) -> bool:
        return m.native.read(features, m.modules, gradients) is not None

    assert is_known(keyed(m))
    found = m.native.read(keyed(m), m.modules, False)
    assert type(found) is JaggedInput
    assert found.keys == m.keys
    assert found.from_lengths
    n = len(m.keys) * m.batch
    offsets = torch.arange(n + 1)
    assert is_known(keyed(m, lengths=None, offsets=offsets))
    assert not is_known(keyed(m, offsets=offsets)), "lengths and offsets must be compared"
    assert not is_known(keyed(m, lengths=None, offsets=offsets.int())), "another dtype"
    assert not is_known(keyed(m, keys=["x", *m.keys[1:]])), "another feature"
    assert not is_known(keyed(m, values=torch.zeros(n, dtype=torch.int32))), "another dtype"
    assert not is_known(keyed(m, values=torch.zeros(n, 2, dtype=torch.int64)[:, 0])), "not contiguous"
    assert not is_known(
        keyed(m, values=torch.zeros(n // 2, dtype=torch.int64), lengths=torch.ones(n // 2, dtype=torch.int64))
    )
    assert not is_known((torch.zeros(n, dtype=torch.int64), offsets)), "a tuple"
    freed = torch.zeros(n, dtype=torch.int64)
    features = keyed(m, values=freed)
    freed.untyped_storage().resize_(0)
    assert not is_known(features), "freed memory"
    m.record[2] = 1
    assert not is_known(keyed(m)), "the device has recorded bad ids"
    m.record[2] = 0
    m.weights[1].requires_grad_()
    assert not is_known(keyed(m), True)
    assert is_known(keyed(m), False)
    m.weights[1].requires_grad_(False)
    moved = m.modules["1"]._parameters
    moved["weight"] = torch.zeros(7, 64)
    assert not is_known(keyed(m)), "a table has moved"
    moved.clear()
    assert not is_known(keyed(m)), "a table is replaced"
    moved["weight"] = m.weights[1]
    m.executor._memory = object()
    assert not is_known(keyed(m)), "the result buffers have moved"
    m.executor._memory = m.memory
    del m.free[1:]
    assert not is_known(keyed(m)), "the result must be copied out of the last buffer"


def test_the_recorded_tensors_are_not_kept() -> None:
    m = made(tables=2, batch=6, ids=30, sms=2, weighted=True, same=True)
    refs = [weakref.ref(tensor) for tensor in (m.jagged.values, m.jagged.offsets, m.jagged.weights, m.out)]
    del m.jagged, m.out
    assert [ref() for ref in refs] == [None] * 4


def test_a_failed_launch_frees_its_buffer() -> None:
    m = made(tables=2, batch=6, ids=30, sms=2, weighted=True, same=True)

    m.program.fails = True
    jagged = m.native.read(m.jagged, m.modules, False)
    with pytest.raises(RuntimeError, match="no launch"):
        m.native.launch(jagged)
    assert m.free == [0, 1, 2]
