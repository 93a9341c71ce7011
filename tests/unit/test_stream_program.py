"""`_core.StreamProgram` with a fake driver (`fake_cuda`).

Tests on GPUs check what only a GPU can show: that streams run concurrently, and that a wait blocks. Cheapest first:
what a program refuses; the driver calls of each operation; bases and ranges of a run; copies against numpy; errors of
the driver; loading; events; threads.
"""

from __future__ import annotations

import gc
import re
import threading
import time

import numpy as np
import pytest
from fake_cuda import COMPILER, call, compiled
from hypothesis import given
from hypothesis import strategies as st

from weft import _core


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C compiler (cc, gcc, clang) to build the fake driver with")
    return lambda *flags: compiled(tmp_path_factory.mktemp("driver"), *flags)


@pytest.fixture(scope="module")
def built(build):
    return build()


@pytest.fixture
def driver(built):
    if built["live_events"]:  # of a program that the traceback of an expected error keeps alive
        gc.collect()
    built.calls()
    assert built["live_events"] == 0
    return built


GOOD_COPY = {"stream": 0, "dst_base": 0, "dst_offset": 0, "dst_pitch": 8, "src_base": 1, "src_offset": 0, "src_pitch": 8,
             "width_bytes": 8, "rows": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "arguments", "named"),
    [
        ("copy", {**GOOD_COPY, "stream": 2}, "stream=2 must be at least 0 and below n_streams=2"),
        ("copy", {**GOOD_COPY, "stream": -1}, "stream=-1"),
        ("copy", {**GOOD_COPY, "dst_base": 3}, "dst_base=3 must be at least 0 and below n_bases=3"),
        ("copy", {**GOOD_COPY, "src_base": -1}, "src_base=-1"),
        ("copy", {**GOOD_COPY, "dst_offset": -8}, "dst_offset=-8"),
        ("copy", {**GOOD_COPY, "src_offset": -1}, "src_offset=-1"),
        ("copy", {**GOOD_COPY, "width_bytes": -1}, "width_bytes=-1"),
        ("copy", {**GOOD_COPY, "rows": -1}, "rows=-1"),
        ("copy", {**GOOD_COPY, "dst_pitch": 7}, "dst_pitch=7"),
        ("copy", {**GOOD_COPY, "src_pitch": 7}, "src_pitch=7"),
        ("signal", {"stream": 0, "parts": [(False, 3, 0, 0)]}, "base=3"),
        ("signal", {"stream": 0, "parts": [(False, 0, 6, 0)]}, "offset=6 bytes must be 0 or a multiple of 4"),
        (
            "signal",
            {"stream": 0, "parts": [(False, 0, 0, 1), (True, 0, 12, 1)]},
            "offset=12 bytes must be 0 or a multiple of 8",
        ),
        ("signal", {"stream": 0, "parts": [(True, 0, -8, 1)]}, "offset=-8"),
        ("signal", {"stream": 5, "parts": [(True, 0, 0, 1)]}, "stream=5"),
        ("signal", {"stream": 0, "parts": []}, "at least one wait or write"),
        ("record", {"stream": 0, "event": 1}, "event=1 must be at least 0 and below n_events=1"),
        ("wait_event", {"stream": 0, "event": -1}, "event=-1"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_its_values(driver, method, arguments, named):
    program = driver.program(3, 2, 1)
    with pytest.raises(ValueError, match=re.escape(named)):
        getattr(program, method)(**arguments)
    assert len(program) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ((0, 2, [1, 2], [3]), ValueError, "first=0, last=2: 0 <= first <= last <= 1"),
        ((1, 0, [1, 2], [3]), ValueError, "first=1, last=0"),
        ((-1, 1, [1, 2], [3]), ValueError, "first=-1"),
        ((0, 1, [1], [3]), ValueError, "bases has 1 numbers, but the program was made for 2"),
        ((0, 1, [1, 2], ()), ValueError, "streams has 0 numbers, but the program was made for 1"),
        ((0, 1, [1, -2], [3]), ValueError, "bases[1] must be an int from 0 to 2^64 - 1"),
        ((0, 1, [1, 2**64], [3]), ValueError, "bases[1]"),
        ((0, 1, [1, 2], [3.0]), ValueError, "streams[0]"),
        ((0, 1, {1, 2}, [3]), TypeError, "bases must be a list or a tuple"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_issued(driver, arguments, error, named):
    program = driver.program(2, 1, 0)
    program.signal(0, [(False, 0, 0, 1)])
    with pytest.raises(error, match=re.escape(named)):
        program.run(*arguments)
    assert driver.calls() == []


def test_each_operation_asks_the_driver_for_one_thing_in_order(driver):
    program = _core.StreamProgram(3, 2, 2, driver.path)
    created = driver.calls()
    first, second = (c[2] for c in created)
    assert created == [call("create", 0, first, 2), call("create", 0, second, 2)], "events are made without timing"

    memory, signals = np.arange(256, dtype=np.uint8), np.zeros(4, np.uint64)
    a, b, s = memory.ctypes.data, memory.ctypes.data + 128, signals.ctypes.data
    streams = [0x1000, 2**63 + 8]
    recorded = [
        program.copy(0, 0, 16, 8, 1, 32, 8, 8, 4),
        program.copy(1, 0, 16, 99, 1, 32, 77, 8, 1),
        program.copy(0, 0, 0, 16, 1, 4, 8, 8, 2),
        program.signal(1, [(False, 2, 8, 2**35 + 5)]),
        program.signal(0, [(True, 2, 8, 4), (False, 2, 8, 0), (False, 2, 20, 7)]),
        program.signal(0, [(True, 2, 8, 2**40 + 4)]),
        program.record(0, 1),
        program.wait_event(1, 1),
        program.record(1, 0),
    ]
    assert recorded == list(range(9))
    assert len(program) == 9
    program.run(0, 9, [a, b, s], streams)
    assert driver.calls() == [
        call("copy", streams[0], a + 16, b + 32, 32),
        call("copy", streams[1], a + 16, b + 32, 8),
        call("copy_2d", streams[0], a, 16, b + 4, 8, 8, 2),
        call("write", streams[1], s + 8, 5, 0, 0, 1),
        call("wait", streams[0], s + 8, 4, 2, 1, 3),
        call("write", streams[0], s + 8, 0, 0, 0, 3),
        call("write", streams[0], s + 20, 7, 0, 0, 3),
        call("wait", streams[0], s + 8, 2**40 + 4, 2, 0, 1),
        call("record", streams[0], second),
        call("wait_event", streams[1], second, 0),
        call("record", streams[1], first),
    ]
    assert signals.tolist() == [0, 0, 7 << 32, 0]


def test_a_kernel_is_launched_with_numbers_and_bases(driver):
    program = driver.program(2, 2, 0)
    kernel = driver.kernel(0, programs=7, threads=256, shared_bytes=1024).base(1, 24).number(99).number(2**31 - 1)
    assert program.launch(1, [(8, kernel)]) == 0
    for base in (4096, 8192):
        program.run(0, 1, [0, base], [0, 5])
        launched = call("launch", 5, driver.handle(0), 7, 256, 1024, base + 24, 99, 2**31 - 1)
        assert driver.calls() == [launched]


def test_bases_give_the_grid_of_a_launch(driver):
    program = driver.program(3, 1, 0)
    program.launch(0, [(8, driver.kernel(1).base(0, 0).grid(1, 2))])
    for x, y in ((5, 1), (2**31 - 1, 3)):
        program.run(0, 1, (64, x, y), (7,))
        assert driver.calls() == [call("launch", 7, driver.handle(1), x + ((y - 1) << 32), 32, 0, 64)]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        program.run(0, 1, (64, 2**31, 1), (7,))
    with pytest.raises(ValueError, match=re.escape("y=3 must be at least 0 and below n_bases=3")):
        program.launch(0, [(8, driver.kernel(1).base(0, 0).grid(1, 3))])
    with pytest.raises(ValueError, match="must not be negative"):
        driver.kernel(1).grid(-1, 0)


def test_a_count_is_passed_to_a_kernel_whatever_its_alignment(driver):
    program = driver.program(2, 1, 0)
    program.launch(0, [(8, driver.kernel(0).base(0, 0).count(1).number(3))])
    for count in (7, 0, 2**40):
        program.run(0, 1, (64, count), (0,))
        assert driver.calls() == [call("launch", 0, driver.handle(0), 1, 32, 0, 64, count, 3)]


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [(0, 3 * 2), (1, 4 * 2), (16, 4 * 2), (17, 5 * 2), (64, 7 * 2), (81, 9 * 2), (97, 20), (2**40, 20)],
)
def test_the_grid_follows_the_number_of_rows(driver, rows, blocks):
    program = driver.program(2, 1, 0)
    program.launch(0, [(8, driver.kernel(1, programs=20).base(0, 0).row_tiles(1, 16, 3, 2))])
    program.run(0, 1, (64, rows), (0,))
    assert driver.calls() == [call("launch", 0, driver.handle(1), blocks, 32, 0, 64)]


def test_a_grid_has_at_least_one_block(driver):
    program = driver.program(2, 1, 0)
    program.launch(0, [(8, driver.kernel(1, programs=20).base(0, 0).row_tiles(1, 16, 0, 2))])
    program.run(0, 1, (64, 0), (0,))
    assert driver.calls() == [call("launch", 0, driver.handle(1), 1, 32, 0, 64)]


def test_nothing_is_launched_if_a_number_is_0(driver):
    program = driver.program(3, 1, 0)
    program.launch(0, [(8, driver.kernel(1).base(0, 0).only_if(1).only_if(2))])
    for numbers in ((0, 5), (5, 0), (0, 0)):
        program.run(0, 1, (64, *numbers), (0,))
    assert driver.calls() == []
    program.run(0, 1, (64, 1, 1), (0,))
    assert len(driver.calls()) == 1


def tensor_map(**changes):
    found = {
        "base": 0, "offset": 32, "data_type": 9, "swizzle": 3, "item_bytes": 2, "sizes": [64, 10], "strides": [128],
        "box": [64, 16], "rows": -1, "instead": -1, "is_sized": False,
    }  # fmt: skip
    return found | changes


def test_a_tensor_map_is_encoded_when_its_address_or_its_rows_change(driver):
    program = driver.program(2, 1, 0)
    kernel = driver.kernel(2).number(5).map(**tensor_map(rows=1, instead=1, is_sized=True))
    with pytest.raises(ValueError, match=re.escape("instead=1 must be below the number of tensor maps, 1")):
        program.launch(0, [(16, kernel)])
    program = driver.program(2, 1, 0)
    program.launch(0, [(16, driver.kernel(2).number(5).map(**tensor_map()))])
    for base, encoded in ((4096, True), (4096, False), (8192, True)):
        program.run(0, 1, (base, 7), (3,))
        address = base + 32
        expected = [call("encode", 0, address, 2, 64, 10)] * encoded
        assert driver.calls() == [*expected, call("launch", 3, driver.handle(2), 1, 32, 0, 5, address)]
        assert driver.last_map() == [address, 2**64 - 1 - 2**21, 9, 3, 64, 10, 0, 128, 0, 0, 64, 16, 0]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        program.run(0, 1, (4100, 7), (3,))  # no kernel for this alignment


def test_a_tensor_map_has_the_rows_of_the_run(driver):
    program = driver.program(3, 1, 0)
    fixed = tensor_map(base=-1, offset=2**20, sizes=[64, 3])
    kernel = driver.kernel(3).map(**tensor_map(rows=1, instead=1, is_sized=True)).map(**fixed)
    program.launch(0, [(16, kernel)])
    encoded = []
    for base, rows in ((4096, 7), (4096, 9), (4096, 0), (0, 0), (4096, 9)):
        program.run(0, 1, (base, rows, 0), (3,))
        *maps, launched = driver.calls()
        encoded.append([(c[2], c[5]) for c in maps])
        assert launched[6:8] == ((base + 32 if rows else 2**20), 2**20), (
            "a tensor map replaces that of a matrix without rows"
        )
    assert encoded == [[(4128, 7), (2**20, 3)], [(4128, 9)], [], [], []]
    program = driver.program(2, 1, 0)
    kernel = driver.kernel(3).map(**tensor_map(rows=1, instead=1)).map(**fixed)
    program.launch(0, [(16, kernel)])
    program.run(0, 1, (4096, 8), (3,))
    assert [c[5] for c in driver.calls()[:2]] == [10, 3], "only an outermost dimension of rows has the rows of the run"


@pytest.mark.parametrize(("version", "rows", "cleared"), [(13010, 1024, 1), (13010, 1025, 0), (13020, 1024, 0)])
def test_older_drivers_need_a_bit_cleared_in_small_tensor_maps(driver, version, rows, cleared):
    driver["driver_version"] = version
    program = driver.program(1, 1, 0)
    program.launch(0, [(16, driver.kernel(2).number(5).map(**tensor_map(sizes=[64, rows])))])
    program.run(0, 1, (4096,), (3,))
    assert driver.last_map()[1] == 2**64 - 1 - cleared * 2**21
    driver["driver_version"] = 12080


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sizes": []}, "a tensor map of 0 sizes, 1 strides and 2 sizes of its box"),
        ({"strides": [128, 256]}, "2 strides"),
        ({"box": [64]}, "1 sizes of its box"),
        ({"rows": 1, "instead": 0}, "instead=0 must be another tensor map of the call"),
        ({"is_sized": True}, "rows=-1 is not the number of a base"),
        ({"base": 2}, "base=2 must be at least 0 and below n_bases=2"),
        ({"rows": 2, "instead": 1}, "rows=2 must be at least 0 and below n_bases=2"),
    ],
)
def test_a_tensor_map_that_cannot_be_is_refused(driver, changes, named):
    program = driver.program(2, 1, 0)
    with pytest.raises(ValueError, match=re.escape(named)):
        program.launch(0, [(16, driver.kernel(2).number(5).map(**tensor_map(**changes)))])


def test_rows_of_a_grid_that_no_base_holds_are_refused(driver):
    program = driver.program(2, 1, 0)
    for kernel, named in (
        (driver.kernel(1).base(0, 0).row_tiles(2, 16, 0, 1), "rows=2 must be at least 0 and below n_bases=2"),
        (driver.kernel(1).base(0, 0).only_if(2), "base=2"),
        (driver.kernel(1).count(2), "base=2"),
    ):
        with pytest.raises(ValueError, match=re.escape(named)):
            program.launch(0, [(1, kernel)])
    for arguments in ((-1, 16, 0, 1), (0, 0, 0, 1), (0, 16, -1, 1), (0, 16, 0, 0)):
        with pytest.raises(ValueError, match="tile and times must be positive"):
            driver.kernel(1).row_tiles(*arguments)


@pytest.mark.parametrize(("bases", "taken"), [((32, 64), 0), ((32, 8), 1), ((6, 64), 2)])
def test_the_first_kernel_is_launched_that_the_addresses_suit(driver, bases, taken):
    program = driver.program(2, 1, 0)
    kernels = [driver.kernel(0, programs=10 + i).base(0, 0).base(1, 16).number(i) for i in range(3)]
    program.launch(0, list(zip((16, 4, 1), kernels, strict=True)))
    program.run(0, 1, bases, [0])
    ((_, _, _, programs, _, _, first, second, number, _),) = driver.calls()
    assert (programs, first, second, number) == (10 + taken, bases[0], bases[1] + 16, taken)


def test_addresses_that_suit_no_kernel_are_an_error(driver):
    program = driver.program(1, 1, 0)
    program.launch(0, [(8, driver.kernel(1).base(0, 0))])
    with pytest.raises(RuntimeError, match=re.escape("operation 0, launch 0, on stream 0: CUDA_ERROR_INVALID_VALUE")):
        program.run(0, 1, [12], [0])
    assert driver.calls() == []


def test_what_a_kernel_does_not_take_is_refused(driver):
    program = driver.program(1, 1, 0)
    assert [program.parameters_of(driver.handle(i)) for i in range(3)] == [[8, 8, 4], [8], [8, 128]]
    kernel = driver.kernel
    for calls, named in [
        ([], "at least one kernel"),
        ([(8, kernel(0).number(1))], "takes 3 parameters, and 1 are given"),
        ([(8, kernel(2).number(1).number(2))], "parameter 1 of the kernel has 128 bytes: numbers have at most 8"),
        ([(8, kernel(1).base(1, 0))], "base=1 must be at least 0 and below n_bases=1"),
        ([(0, kernel(1).number(1))], "alignment=0 must be positive"),
    ]:
        with pytest.raises(ValueError, match=re.escape(named)):
            program.launch(0, calls)
    assert len(program) == 0
    for arguments in ((0, 1, 1, 0), (8, 0, 1, 0), (8, 1, 0, 0), (8, 1, 1, -1)):
        with pytest.raises(ValueError, match=r"is not a kernel|must be positive, and shared_bytes"):
            _core.KernelCall(*arguments)


@pytest.mark.parametrize(("width", "rows"), [(0, 5), (8, 0), (0, 0)])
def test_a_copy_of_nothing_is_an_operation_that_issues_nothing(driver, width, rows):
    program = driver.program(2, 1, 0)
    assert program.copy(0, 0, 0, 16, 1, 0, 8, width, rows) == 0
    program.run(0, 1, [0, 0], [0])
    assert driver.calls() == []


def test_a_program_is_run_again_with_other_bases_and_streams(driver):
    program = driver.program(2, 1, 0)
    program.copy(0, 0, 0, 8, 1, 0, 8, 8, 1)
    program.signal(0, [(False, 0, 8, 9)])
    source = np.arange(4, dtype=np.uint64)
    targets = np.zeros((3, 2), np.uint64)
    for i, target in enumerate(targets):
        program.run(0, 2, (target.ctypes.data, source[i + 1 :].ctypes.data), (i,))
    assert targets.tolist() == [[1, 9], [2, 9], [3, 9]]
    assert [c[1] for c in driver.calls()] == [0, 0, 1, 1, 2, 2]


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_run_issues_its_range_alone(built, first, last):
    program = built.program(1, 1, 0)
    signals = np.zeros(6, np.uint64)
    for i in range(6):
        program.signal(0, [(False, 0, 8 * i, i + 1)])
    first, last = sorted((first, last))
    program.run(first, last, [signals.ctypes.data], [0])
    assert signals.tolist() == [i + 1 if first <= i < last else 0 for i in range(6)]
    assert [c[3] for c in built.calls()] == list(range(first + 1, last + 1))


@given(
    rows=st.integers(0, 9),
    width=st.integers(0, 65),
    gaps=st.tuples(st.sampled_from([0, 0, 1, 64]), st.sampled_from([0, 0, 3, 64])),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_copies_move_the_rows_in_one_call_and_nothing_beside_them(built, rows, width, gaps, offsets):
    pitches = width + gaps[0], width + gaps[1]
    dst = np.full(offsets[0] + rows * pitches[0] + 8, 255, np.uint8)
    src = np.arange(offsets[1] + rows * pitches[1] + 8, dtype=np.uint8) % 251
    want = dst.copy()
    for row in range(rows):
        to, at = offsets[0] + row * pitches[0], offsets[1] + row * pitches[1]
        want[to : to + width] = src[at : at + width]
    program = built.program(2, 1, 0)
    program.copy(0, 1, offsets[0], pitches[0], 0, offsets[1], pitches[1], width, rows)
    program.run(0, 1, [src.ctypes.data, dst.ctypes.data], [0])
    np.testing.assert_array_equal(dst, want)
    names = [c[0] for c in built.calls()]
    assert names == ([] if rows * width == 0 else ["copy"] if rows == 1 or gaps == (0, 0) else ["copy_2d"])


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (0, "operation 0, copy of 2 rows of 8 bytes from base 1 + 4 (pitch 8) to base 0 + 0 (pitch 16), on stream 1"),
        (1, "operation 1, signal 0, on stream 0"),
        (2, "operation 2, signal 1, on stream 1"),
        (3, "operation 3, record of event 0, on stream 0"),
        (4, "operation 4, wait for event 0, on stream 1"),
    ],
)
def test_an_error_of_the_driver_names_the_operation_and_the_error(driver, at, what):
    memory = np.zeros(64, np.uint64)
    bases = [memory.ctypes.data, memory.ctypes.data + 128, memory.ctypes.data + 256]
    program = driver.program(3, 2, 1)
    program.copy(1, 0, 0, 16, 1, 4, 8, 8, 2)
    program.signal(0, [(False, 2, 8, 3)])
    program.signal(1, [(True, 2, 0, 1)])
    program.record(0, 0)
    program.wait_event(1, 0)
    driver["fail_at"] = at
    with pytest.raises(RuntimeError, match=re.escape(f"{what}: CUDA_ERROR_INVALID_VALUE (1): invalid argument")):
        program.run(0, 5, bases, [8, 16])
    assert len(driver.calls()) == at, "what came before has been issued, what comes after has not"
    program.run(0, 5, bases, [8, 16])
    assert len(driver.calls()) == 5, "a program that failed can be run again"


def test_an_error_that_the_driver_cannot_name_is_told_by_number(driver):
    program = driver.program(0, 1, 1)
    program.record(0, 0)
    driver["fail_at"], driver["fail_with"] = 0, 12345
    with pytest.raises(RuntimeError, match=r"an error that the driver cannot name \(12345\): no description"):
        program.run(0, 1, [], [0])
    driver["fail_with"] = 1


def test_no_driver_is_an_error_that_says_what_was_looked_for():
    with pytest.raises(RuntimeError, match=r"cannot load libno-such-driver\.so.*No such file.*need an NVIDIA driver"):
        _core.StreamProgram(1, 1, 0, "libno-such-driver.so")


def test_a_library_without_a_function_is_named_with_it(build):
    path = build("-DINCOMPLETE").path
    with pytest.raises(RuntimeError, match=re.escape(f"{path} has no cuMemcpyAsync")):
        _core.StreamProgram(1, 1, 0, path)


def test_older_names_of_the_stream_memory_operations_are_found(build):
    old = build("-DOLD")
    program, signal = old.program(1, 1, 0), np.zeros(1, np.uint64)
    program.signal(0, [(False, 0, 0, 1), (True, 0, 0, 1)])
    program.run(0, 1, [signal.ctypes.data], [0])
    assert [c[0] for c in old.calls()] == ["write", "wait"]
    assert program.parameters_of(old.handle(0)) == [], "nor did it tell parameters"


@pytest.mark.parametrize("named", ["n_bases", "n_streams", "n_events"])
def test_negative_counts_are_refused(driver, named):
    with pytest.raises(ValueError, match=f"{named}=-1.* must not be negative"):
        _core.StreamProgram(**{"n_bases": 1, "n_streams": 1, "n_events": 1, named: -1}, library=driver.path)


def test_events_go_with_their_program(driver):
    program = driver.program(0, 0, 3)
    assert driver["live_events"] == 3
    del program
    assert driver["live_events"] == 0


def test_events_that_were_made_go_when_one_cannot_be(driver):
    driver["fail_at"] = 2
    with pytest.raises(RuntimeError, match="creation of event 2: CUDA_ERROR_INVALID_VALUE"):
        _core.StreamProgram(0, 0, 3, driver.path)
    assert driver["live_events"] == 0
    assert [c[0] for c in driver.calls()] == ["create", "create", "destroy", "destroy"]


def test_a_context_that_went_first_is_no_harm(driver):
    program = driver.program(0, 0, 2)
    driver["context_gone"] = 1
    del program
    driver["context_gone"], driver["live_events"] = 0, 0


def test_a_run_leaves_the_interpreter_free_and_the_program_to_one_thread(driver):
    program, signal = driver.program(1, 1, 0), np.ones(1, np.uint64)
    program.signal(0, [(True, 0, 0, 1)])
    driver["hold"] = 1
    thread = threading.Thread(target=program.run, args=(0, 1, [signal.ctypes.data], [0]))
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while driver["held"] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert driver["held"] > 0, "the other thread is inside the driver"
        with pytest.raises(RuntimeError, match="another thread runs this program"):
            program.run(0, 1, [signal.ctypes.data], [0])
        with pytest.raises(RuntimeError, match="another thread runs this program"):
            program.signal(0, [(False, 0, 0, 1)])
    finally:
        driver["hold"] = 0
        thread.join()
    assert driver.calls() == [call("wait", 0, signal.ctypes.data, 1, 2, 1, 1)]
    assert program.signal(0, [(False, 0, 0, 1)]) == 1
