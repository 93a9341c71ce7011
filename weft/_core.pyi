"""Types of the compiled module (csrc/). Addresses are plain integers: the module knows no torch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# csrc/signal.cpp
COUNTER_BYTES: int

def signal_set(address: int, value: int) -> None:
    """Store `value` with release order and wake all waiters."""

def signal_add(address: int, amount: int) -> None:
    """Add with release order and wake all waiters."""

def signal_read(address: int) -> int:
    """The value now, with acquire order."""

def signal_wait(address: int, wanted: int, deadline_s: float, failed_address: int) -> tuple[int, int]:
    """Wait until the counter is at least `wanted`.

    Returns (0 reached | 1 deadline passed | 2 the failed word was set, the value last read).
    """

# csrc/lease.cpp
def lease(
    address: int,
    shape: Sequence[int],
    dtype_code: int,
    dtype_bits: int,
    device_type: int,
    device_id: int,
    owner: object,
) -> object:
    """A DLPack capsule of a tensor over `address` (row-major; DLPack dtype and device codes) that keeps `owner` alive."""

# csrc/layouts.cpp
class LayoutReader:
    """A reader of tensors' addresses and layouts, by DLPack's C exchange API.

    Args:
        tensor, parameter: the types of tensors. Not of others that derive from these, which may keep their values elsewhere.

    Raises:
        AttributeError, RuntimeError: they offer no such API, or one of a version that is not known here.
    """

    def __init__(self, tensor: type, parameter: type) -> None: ...
    def read(self, tensors: list[Any], gradients: bool) -> bytes | None:
        """Address, device, dtype, sizes and strides of all: equal if all of these are. With `gradients` None, if one requires one.

        Raises RuntimeError for what has no memory.
        """

    def signature(self, arguments: tuple[object, ...], gradients: bool) -> bytes | None:
        """Return a key of a call's arguments: tensors without their addresses, numbers, flags, None, and lists of these.

        None if there is anything else, if the storage of a tensor was freed, and, with `gradients`, if a tensor requires one.
        """

# csrc/group_calls.cpp
class CallLock:
    """A reentrant lock without waiting: `acquire` returns False if another thread holds it."""

    def acquire(self, *, blocking: bool) -> bool: ...
    def release(self) -> None: ...

class CallCounts:
    """The numbers of calls of a group that this rank has begun and ended, and refusals (`weft.symm.calls`).

    running: held during a call; a nested call, such as one in a layer, takes it again. has_layers: options of layers wait for the
        next call. refused_by_peers: by number of a call, why.
    """

    running: CallLock
    begun: int
    ended: int
    unanswered: int
    has_layers: bool
    @property
    def refused_by_peers(self) -> dict[int, str]: ...

class CallDigest:
    """The digest of calls up to each of the last `kept` calls, each with the words of layers.

    digest, what: up to the last `note`. last: the number of the last call that has ended.
    """

    words: tuple[int, int]
    def __init__(self, kept: int) -> None: ...
    @property
    def digest(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def what(self) -> str: ...
    def note(self, fingerprint: int, what: str) -> None: ...
    def end(self, number: int) -> None: ...
    def digest_at(self, number: int) -> int: ...
    def words_at(self, number: int) -> tuple[int, int]: ...

class Health:
    """The failure state of a group, and the time of the watchdog's last look (`time.monotonic`), at most `stale_s` ago if all is
    well.

    failed_address: of an int64, which is not 0 once the group has failed or is closed. looks: if there are any, only they know.
    """

    looked_at: float
    def __init__(self, stale_s: float) -> None: ...
    @property
    def failed_address(self) -> int: ...
    @property
    def looks(self) -> list[Any]: ...
    def is_stale(self) -> bool: ...
    def is_well(self) -> bool: ...

# csrc/plain_steps.cpp
def scaled_mm(
    function: Callable[..., Any],
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    dtype: Any,
    fast: bool,
    out: Any,
) -> Any:
    """out = (a * scale_a) @ (b * scale_b) + bias, by `function`, which is torch's for GPUs. out: None for new memory."""

class TorchCalls:
    """The functions of torch that steps call. scaled_elsewhere: computes scaled products on devices other than GPUs."""

    def __init__(
        self,
        *,
        reader: LayoutReader,
        mm: Callable[..., Any],
        scaled_mm: Callable[..., Any],
        scaled_elsewhere: Callable[..., None],
        byte: object,
        gather: Callable[..., Any],
        gather_options: object,
        scatter: Callable[..., Any],
        scatter_options: object,
        reduce: Callable[..., Any],
        reduce_options: object,
    ) -> None: ...

class PlainSteps:
    """GEMMs and collectives of equal parts over whole matrices, one after the other.

    Args:
        buffers: names, inputs first.
        steps: (kind, the buffer that it writes, the buffers that it reads, dtype); of kind "called", a function of these buffers in
            place of the dtype.
        world: ranks.
    """

    def __init__(self, torch: TorchCalls, buffers: list[str], steps: list[Any], world: int) -> None: ...
    def run(self, inputs: dict[str, Any], group: object) -> dict[str, Any]:
        """Run all steps. Return all buffers."""

# csrc/replay.cpp
class Recipe:
    """A recipe that makes a value from a call's tensors; written as nested tuples (csrc/recipe.hpp)."""

    def __init__(self, written: tuple[Any, ...]) -> None: ...
    def __call__(self, positional: Sequence[Any], named: dict[str, Any]) -> Any: ...

class Surroundings:
    """The process state that known calls check. groups: all live groups. coalescing: groups whose collectives torch coalesces."""

    def __init__(
        self,
        *,
        groups: dict[Any, Any],
        coalescing: dict[Any, Any],
        is_any_autocast_enabled: Callable[[], bool],
        is_autocast_enabled: Callable[[str], bool],
        is_capturing: Callable[[], bool],
    ) -> None: ...

class KnownCall:
    """A recorded call, for replay with other tensors.

    Args:
        of: its Python part (`weft.operator.replay`).
        inputs: a recipe of a list, in the order of the first buffers of `steps`.
        steps: None if Python runs the call.
        results: names of the buffers that it returns.
        returned: a recipe for the function's result, from the results.
        usual, captured: True if `steps` runs calls, and captured calls.
    """

    def __init__(
        self,
        of: object,
        surroundings: Surroundings,
        inputs: tuple[Any, ...] | None,
        steps: PlainSteps | None,
        results: list[str],
        returned: tuple[Any, ...],
        *,
        usual: bool,
        captured: bool,
    ) -> None: ...

class UnknownCall:
    """A call that cannot be replayed yet.

    key: of equal calls; None if such calls are never replayed. family: of such calls with any number of rows, if their
        sizes may pass.
    """

    @property
    def key(self) -> bytes | None: ...
    @property
    def family(self) -> bytes | None: ...

class KnownCalls:
    """The known calls of a function.

    Args:
        calls, families: by key, a `KnownCall`, or None for calls that take the slow path.
        identified: types whose objects are compared by identity.
        unusual: functions that return a true value if calls may mean something else.
        forward_ad: the globals of torch.autograd.forward_ad.
    """

    def __init__(
        self,
        reader: LayoutReader,
        calls: dict[bytes, KnownCall | None],
        families: dict[bytes, KnownCall],
        identified: tuple[type, ...],
        unusual: tuple[Callable[[], object], ...],
        is_grad_enabled: Callable[[], bool],
        forward_ad: dict[str, Any],
    ) -> None: ...
    def __call__(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Replay an earlier call with these arguments and return its result, or return an `UnknownCall`."""

# csrc/mapping.cpp
class Mapping:
    """A sealed memfd mapped readable, writable and shared, pages in place; unmapped when the last reference goes."""

    def __init__(self, fd: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask the kernel for huge pages in memory that is not touched yet. It may ignore it."""

# csrc/accumulate.cpp
def add_2d(dst: int, dst_pitch: int, src: int, src_pitch: int, cols: int, rows: int, dtype: str) -> None:
    """Add `rows` rows of `cols` elements at address `src` to those at `dst`, each element in one piece, rounded each time.

    dtype: "fp32", "bf16", "fp16" or "fp64". Several processes and threads may add to the same elements at once. A row starts a
    pitch (bytes) after the one before. Releases the GIL; ends with a release fence, as `copy_2d` does.
    """

# csrc/copy.cpp
def copy_2d(dst: int, dst_pitch: int, src: int, src_pitch: int, width_bytes: int, rows: int) -> None:
    """Copy `rows` rows of `width_bytes` from address `src` to `dst`; the memory may not overlap.

    A row starts a pitch (bytes) after the one before. Releases the GIL; one memcpy when nothing lies between the rows.
    Ends with a release fence, so that whoever has waited for a signal set afterwards sees the bytes.

    Raises:
        ValueError: a negative size, a pitch below the width, or more than 2^63 bytes; with the values.
    """

# csrc/stream_program.cpp
class KernelCall:
    """A loaded kernel with its arguments, in the order of its parameters.

    Args:
        function: the driver's handle of it (CUfunction), in the context that will be current.
        programs, threads: how many blocks (along x), and threads in each.
        shared_bytes: dynamic shared memory of a block.
    """

    def __init__(self, function: int, programs: int, threads: int, shared_bytes: int) -> None: ...
    def number(self, value: int) -> KernelCall:
        """Set the next parameter to `value`, or to its low bytes if the parameter is shorter."""

    def base(self, base: int, offset: int) -> KernelCall:
        """Set the next parameter to the address of base number `base` plus `offset` bytes."""

    def grid(self, x: int, y: int) -> KernelCall:
        """Launch as many blocks along x and y as bases number `x` and `y` of a run say, in place of `programs`."""

class StreamProgram:
    """Copies, signals, events and kernels on CUDA streams: recorded once, issued many times with other buffers.

    Buffers, streams and events are numbers; `run` says which addresses and stream handles they are. Methods that record
    return the operation's index and raise ValueError, with the values, for a number, offset or size out of range.
    Not for two threads at once.

    Args:
        n_bases, n_streams, n_events: the numbers of bases, streams and events. Events belong to the program; they
            are made in the current context.
        library: the driver to load.

    Raises:
        RuntimeError: the driver cannot be loaded or lacks a function, or an event cannot be made; says why.
    """

    def __init__(self, n_bases: int, n_streams: int, n_events: int, library: str = "libcuda.so.1") -> None: ...
    def copy(
        self,
        stream: int,
        dst_base: int,
        dst_offset: int,
        dst_pitch: int,
        src_base: int,
        src_offset: int,
        src_pitch: int,
        width_bytes: int,
        rows: int,
    ) -> int:
        """Copy `rows` rows of `width_bytes`: one plain copy if the rows are adjacent, else one 2D copy.

        Offsets and pitches in bytes. Peers' memory may be on either side. Without rows or bytes nothing is issued.
        """

    def signal(self, stream: int, parts: list[tuple[bool, int, int, int]]) -> int:
        """Issue waits and writes in this order, in one call of the driver. Each is (True for a wait, base, offset, number).

        A wait holds the stream until the 64 bits at `base` + `offset` (a multiple of 8) and `number` have a bit in common.
        A write stores the low 32 bits of `number` there (a multiple of 4), after all that the stream did. There is no
        deadline: a stream whose signal never arrives waits until the word is written.
        """

    def record(self, stream: int, event: int) -> int:
        """Record the event on the stream."""

    def wait_event(self, stream: int, event: int) -> int:
        """Make the stream wait for the event's last record before this call."""

    def launch(self, stream: int, calls: list[tuple[int, KernelCall]]) -> int:
        """Launch the first kernel whose bases, with their offsets, are all multiples of the number beside it.

        Raises ValueError if a kernel has other parameters than are given, as far as the driver can tell.
        """

    def parameters_of(self, function: int) -> list[int]:
        """Return the bytes of each parameter of a kernel; empty if the driver cannot tell (before CUDA 12.4)."""

    def __len__(self) -> int: ...
    def run(
        self,
        first: int,
        last: int,
        bases: list[int] | tuple[int, ...],
        streams: list[int] | tuple[int, ...],
    ) -> None:
        """Issue operations [first, last) in the order of their recording, without the GIL and without waiting for them.

        Args:
            bases: [n_bases] addresses.
            streams: [n_streams] handles (`torch.cuda.Stream.cuda_stream`); 0 is the legacy default stream.

        Raises:
            ValueError: a range, or a length or number of `bases` or `streams`, that does not fit the program.
            RuntimeError: the driver refused an operation: which, its sizes, the error's name and meaning. Those
                before it have been issued. Or: another thread is running this program.
        """

# csrc/fluid.cpp
MAX_MIN_LEAST: float
_Amounts: TypeAlias = Sequence[tuple[int, float]]
_Load: TypeAlias = tuple[_Amounts, _Amounts, _Amounts, _Amounts]

def max_min_speeds(
    loads: Sequence[_Load],
    counts: Sequence[int],
) -> list[float]:
    """`weft.sim.max_min.speeds` of `counts[i]` steps with the load `loads[i]`, for each i."""

class Fluid:
    """The work of lanes on shared resources, at speeds that depend on the concurrent work.

    Args:
        loads: `weft.sim.max_min.Load`s; each step has one load.
        parts: [lanes] the part of each lane. Lanes of different parts must not slow each other down.
        pulses: the number of equal parts of work after which a step may report progress; at most 32.
        most_known: the approximate number of cached speeds.
    """

    def __init__(
        self,
        loads: Sequence[_Load],
        parts: Sequence[int],
        pulses: int,
        most_known: int,
    ) -> None: ...
    def begin(self, now: float, lane: int, load: int, work_us: float, pulses: int) -> list[tuple[int, bool]]:
        """Begin work of `work_us` at full speed on an idle lane. Return the result of `to(now)` for the lane's part.

        pulses: bit i is set if the step reports progress at the end of part i + 1.
        """

    def next_us(self) -> float:
        """Return the time of the next end or pulse; infinity if no lane works."""

    def to(self, now: float) -> list[tuple[int, bool]]:
        """Advance to `now`, no later than `next_us()`. Return (lane, True if it is done, False if it reached a pulse)."""

    @property
    def known(self) -> int:
        """The number of cached speeds."""

# csrc/embedding_all_to_all_module.cpp
def embedding_all_to_all(
    *,
    slots: NDArray[np.int64],
    values: int,
    values_bits: int,
    n_values: int,
    offsets: int,
    offsets_bits: int,
    per_sample_weights: int,
    batch_starts: NDArray[np.int64],
    rank: int,
    outputs: NDArray[np.int64],
    output_stride: int,
    dtype: int,
    transport: int,
    remote_first: bool,
    slice_size: int,
    hash: bool,
    bounds: int,
    n_threads: int,
    flags: NDArray[np.int64],
    epoch: int,
    timeline: NDArray[np.int64] | None,
    isa: str = "",
) -> tuple[int, int, int, int, int, int, int, int]:
    """Pool this rank's slots for the global batch and store every vector where its sample's owner reads it.

    Releases the GIL; uses no memory but buffers of the threads. Numerics are stated in csrc/pooling.hpp.

    Args:
        slots: [n, 6], this rank's slots in column order: address of the table's first row, rows, dim, key (which block
            of `batch` offsets), first output column (elements), 1 for mean or 0 for sum. Tables are row-major.
        values, values_bits, n_values: address of the indices, 32 or 64, how many.
        offsets, offsets_bits: address of the offsets, feature-major (keys x batch + 1), 32 or 64. They are read as
            ascending and clamped to [0, n_values], so that nothing outside `values` is ever read.
        per_sample_weights: address of `n_values` float32, or 0.
        batch_starts: [W + 1], first global sample of each rank, then the global batch.
        rank: this rank.
        outputs: [W], address of each rank's output [its batch, output_stride] as mapped here; 0: its samples are not pooled.
        output_stride: elements from one output row to the next.
        dtype: of tables and outputs: 0 fp32, 1 fp16, 2 bf16.
        transport: 0 direct (no flags are raised), 1 put.
        remote_first: work on the samples of rank + 1, rank + 2, ..., this rank; otherwise in batch order.
        slice_size: most vectors of a slice (see `slice_runs`).
        hash: the row is hash(index) mod rows (weft/embedding/hashing.py); no index is bad then.
        bounds: 0 ignore (the caller promises), 1 warning (a bad index reads a row of zeros and is counted), 2 fatal
            (all indices are looked at first; if any is bad nothing is written and no flag is raised).
        n_threads: threads that share the work, the caller's included.
        flags: [W] with put, the address of this rank's flags (int64) at each rank; otherwise ignored. The flag of
            slice j of a sample is number (sample - batch_starts[destination]) * slices_per_sample + j.
        epoch: what is stored to a flag, with release order, after its slice.
        timeline: [capacity, 5] int64 to be filled, or None. A record is kind (0 computed, nothing left this rank;
            1 stored or copied to another rank), thread, start_ns, end_ns (CLOCK_MONOTONIC), bytes that left. There is
            one record, with put and another rank's samples two, for each slice of each block of samples: at most
            2 x slices x (global batch / 32 + W) as long as a slice is below 128 KiB. Recording costs a few percent.
        isa: one of `isas()`, or "" for the best.

    Returns:
        (bad indices, slot, sample, position in the bag and value of the first of them (-1, -1, -1, 0 if none), slices
        copied to other ranks, flags raised, records: more than the timeline's capacity if some did not fit). Slots
        number the lines of `slots`.

    Raises:
        ValueError: an argument that no caller may pass; names it and its value.
    """

def slice_runs(slots: NDArray[np.int64], slice_size: int) -> list[tuple[int, int, int, int]]:
    """The slices of every sample: (first slot, slots, first column, columns), in the order of their flags."""

def wait_flags(address: int, count: int, epoch: int, deadline_s: float, failed_address: int) -> tuple[int, int, int]:
    """Wait until each of `count` int64 flags has reached `epoch`, with acquire order.

    Returns (0 reached | 1 deadline passed | 2 the failed word was set, index of the first missing flag, its value).
    """

def isas() -> list[str]:
    """The instruction sets that the CPU kernel can use on this machine, best first."""

def isa() -> str:
    """The instruction set that the CPU kernel uses by default."""

# csrc/embedding_backward_module.cpp
class SortedRows:
    """The ids of a batch, sorted by table, row, slot, sample and place in the bag. It keeps a copy of what it needs.

    Out-of-range ids are left out. Sums and orders are stated in csrc/embedding_backward.hpp.
    """

    def __init__(
        self,
        *,
        slots: NDArray[np.int64],
        tables: NDArray[np.int64],
        values: int,
        values_bits: int,
        n_values: int,
        offsets: int,
        offsets_bits: int,
        per_sample_weights: int,
        batch: int,
        hash: bool,
        n_threads: int,
    ) -> None:
        """Sort. Releases the GIL.

        Args:
            slots: [n, 4], this rank's slots in column order: number of the table, key (which block of `batch` offsets),
                first column of the gradient (elements), 1 for mean or 0 for sum.
            tables: [t, 2], rows and dim of this rank's tables.
            values, values_bits, n_values, offsets, offsets_bits, per_sample_weights, hash, n_threads: as in
                `embedding_all_to_all`.
            batch: samples of the global batch.

        Raises:
            ValueError: an argument that no caller may pass, or 2**32 bags of one table or more.
        """

    def counts(self) -> list[int]:
        """How many rows of each table occur."""

    def rows(self, table: int, out: int) -> None:
        """Write the rows of a table that occur, ascending, as int64 to address `out`."""

    def update(
        self,
        *,
        memory: NDArray[np.int64],
        gradients: int,
        stride: int,
        gradients_dtype: int,
        dtype: int,
        rule: int,
        sparse: bool,
        numbers: list[float],
        is_stochastic: bool,
        seed: int,
        skip_nonfinite: bool,
        n_threads: int,
        isa: str = "",
    ) -> int:
        """Reduce the gradient of every row that occurs, and apply a rule to it. Releases the GIL.

        Args:
            memory: [t, 5], addresses of each table's weight, first state, second state and, for rules 0 and 6, output; the
                number of the table for random bits.
            gradients, stride: address of the gradients [batch, stride]; elements from row to row.
            gradients_dtype, dtype: 0 fp32, 1 fp16, 2 bf16; of the gradients, and of tables and the output of rule 0.
            rule: 0 gradient (written to the output), 1 SGD, 2 rowwise Adagrad, 3 Adagrad, 4 Adam, 5 partial rowwise Adam, 6 sum
                of squares of each occurring row's gradient (float32, written to the output).
            sparse: of rule 0: the output has one row for each row that occurs, and not one for each row of the table.
            numbers: learning rate, factor of the gradients, eps, weight decay, beta1, beta2, 1 - beta1, 1 - beta2, Adam's
                two corrections, and the largest element of a gradient.
            is_stochastic, seed: round rows of 16 bits up or down at random.
            skip_nonfinite: leave a row alone whose gradient is infinite or NaN.
            isa: one of `isas()`, or "" for the best. Results have the same bits.

        Returns:
            How many rows were left alone.
        """

def gradients_of_weights(
    *,
    slots: NDArray[np.int64],
    tables: NDArray[np.int64],
    weights: list[int],
    values: int,
    values_bits: int,
    n_values: int,
    offsets: int,
    offsets_bits: int,
    batch: int,
    hash: bool,
    gradients: int,
    stride: int,
    dtype: int,
    out: int,
    n_threads: int,
) -> None:
    """Write the gradients of per-sample weights, float32 [n_values], to address `out`. Releases the GIL.

    weights: address of each table. The other arguments are those of `SortedRows`.
    """

class ControllerSetup:
    """The numbers of a run of the memory controller: csrc/memory_controller.cpp. Times in ns, bytes of the whole GPU."""

    def __init__(self) -> None: ...
    read_ns: float
    store_ns: float
    update_ns: float
    burst: float
    latency_ns: float
    llc: float
    queue: int
    stores: int
    high: int
    low: int
    arbitration: int
    own_writes: int
    intensities: list[float]
    thresholds: list[int]
    starved_ns: float
    link_ns: float
    link_latency_ns: float
    link_queue: float
    dma_window: float
    units: int
    slots: int
    ahead: int
    slabs: int
    slab_ns: float
    a_slab: float
    b_slab: float
    a: list[int]
    b: list[int]
    bytes: list[float]
    chunk: list[int]
    output: list[int]
    copied: list[int]
    expected: list[int]
    lands: list[int]
    peer: list[int]
    link: list[int]
    block: int
    made: bool
    copies: int
    arrival: int
    sets: int
    ways: int
    wavefronts: int
    bin_ns: float

def run_controllers(setups: Sequence[ControllerSetup]) -> list[tuple[dict[str, float], list[list[float]]]]:
    """Run all to the end, together. Return for each the totals by name, and the bytes of each kind in each bin of time."""
