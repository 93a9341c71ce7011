"""Types of the compiled module (csrc/). The module does not link to torch, so addresses are plain integers."""

import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# csrc/signal.cpp
COUNTER_BYTES: int

def signal_set(address: int, value: int) -> None:
    """Store `value` in the counter at `address` with release order, and wake all waiters."""

def signal_add(address: int, amount: int) -> None:
    """Add `amount` to the counter at `address` with release order, and wake all waiters."""

def signal_read(address: int) -> int:
    """Return the value of the counter at `address`, read with acquire order."""

def signal_wait(address: int, wanted: int, deadline_s: float, failed_address: int) -> tuple[int, int]:
    """Wait until the counter at `address` is at least `wanted`. Return (outcome, the last value read).

    The outcome is 0 if the counter has reached `wanted`, 1 if `deadline_s` seconds have passed, and 2 if the int64 at
    `failed_address` is not 0.
    """

# csrc/exchange.cpp
class PayloadExchange:
    """A small all-gather through shared memory, which ranks may repeat (`weft.symm.exchange`).

    Args:
        memory: the mapped memory of each rank, of `bytes_for(nbytes, data_bytes)` bytes, which are 0 at first.
        nbytes: the length of the longest payload.
        data_bytes: the memory for data that may travel with a payload (`SharedCollective`).
    """

    def __init__(self, memory: list[Mapping], rank: int, nbytes: int, data_bytes: int = 0) -> None: ...
    @staticmethod
    def bytes_for(nbytes: int, data_bytes: int = 0) -> int: ...
    def begin(self, payload: bytes, patience_s: float, failed_address: int) -> bool:
        """Begin the next exchange. Return True if all ranks have begun it.

        Return False if a rank has not begun it after `patience_s` seconds, or if the int64 at `failed_address` is not 0.
        Raise ValueError if the payload is too long: the exchange has then not begun.
        """

    def is_equal(self) -> bool:
        """True if all payloads are equal. Only valid when all ranks have begun the exchange, as `payloads`."""

    def payloads(self) -> list[bytes]:
        """Return a copy of every rank's payload, by rank."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    @property
    def epoch(self) -> int:
        """The number of exchanges that this rank has begun. The counter of a rank has this value."""

class SharedCollective:
    """A collective within a host, whose data travel with the payloads of `exchange` (csrc/shared_collective.hpp).

    Call `load` before the exchange begins, and `run` afterwards. `exchange` must have `least_bytes(ranks)` bytes for data.

    Args:
        part, whole, from_, to: addresses of this rank's arrays. They must stay valid until the collective is complete.
        part_bytes: the size of one rank's part.
        dtype: the element type of a sum: 0 fp32, 1 fp16, 2 bf16, 3 fp64.
        sent, received: the number of bytes to and from each rank.
    """

    @staticmethod
    def least_bytes(ranks: int) -> int: ...
    @staticmethod
    def all_gather(exchange: PayloadExchange, part: int, whole: int, part_bytes: int) -> SharedCollective: ...
    @staticmethod
    def reduce_scatter(
        exchange: PayloadExchange, whole: int, part: int, part_bytes: int, dtype: int
    ) -> SharedCollective: ...
    @staticmethod
    def all_reduce(exchange: PayloadExchange, whole: int, nbytes: int, dtype: int) -> SharedCollective: ...
    @staticmethod
    def all_to_all(
        exchange: PayloadExchange, from_: int, to: int, sent: list[int], received: list[int]
    ) -> SharedCollective: ...
    @staticmethod
    def exchange_rows(
        exchange: PayloadExchange,
        from_: int,
        counts: list[int],
        row_bytes: int,
        from_by_expert: bool,
        to_by_expert: bool,
    ) -> SharedCollective:
        """Return an all-to-all of rows for the experts of each rank. counts: the number of rows for each rank and expert. Call
        `place` before `run`.

        from_by_expert: True if this rank's rows are ordered by expert and then by rank; False for the opposite.
        to_by_expert: the same for the rows that this rank receives.
        """

    @staticmethod
    def has_room(exchange: PayloadExchange, numbers: int) -> bool:
        """True if `exchange` has room for this many numbers of rows (`exchange_rows`)."""

    def counts(self) -> list[int]:
        """Return the number of rows from each rank for each expert of this rank, when all ranks have begun the exchange."""

    def place(self, to: int, nbytes: int) -> None:
        """Set the address and the size of the memory for all rows that this rank receives."""

    def load(self) -> None:
        """Write this rank's first data to shared memory."""

    def run(self, patience_s: float, failed_address: int, is_met: bool) -> int:
        """Run the collective to its end, and return 0. Return 1 if peers take longer than `patience_s` in a round, or if the
        int64 at `failed_address` is not 0. Return 2 if the payloads of a round differ. The caller may then call again.

        is_met: True if the caller has checked that all ranks have begun the current round with the same payload.
        Raise ValueError if a peer sends another number of bytes than `received`.
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
    """Return a DLPack capsule of a row-major tensor at `address`, which keeps `owner` alive. Codes are those of DLPack."""

# csrc/layouts.cpp
class LayoutReader:
    """A reader of tensors' addresses and layouts, by DLPack's C exchange API.

    Args:
        tensor, parameter: the two types that it reads, `torch.Tensor` and `Parameter`. It refuses subclasses, which may
            keep their values elsewhere.

    Raises:
        AttributeError, RuntimeError: `tensor` does not offer version 1 of this API.
    """

    def __init__(self, tensor: type, parameter: type) -> None: ...
    def read(self, tensors: list[Any], gradients: bool) -> bytes | None:
        """Return a key of the tensors' addresses, devices, dtypes, sizes and strides.

        Return None if an object is not of the two types, or with `gradients` if a tensor requires a gradient. Raise
        RuntimeError for a tensor without memory.
        """

    def signature(self, arguments: tuple[object, ...], gradients: bool) -> bytes | None:
        """Return a key of a call's arguments: tensors without their addresses, numbers, flags, None, and lists of these.

        Return None for any other argument, for a tensor whose storage was freed, and with `gradients` for a tensor that
        requires a gradient.
        """

# csrc/rail.cpp
class RailLink:
    """Messages between the ranks of a rail (`weft.runtime.rail_link`). One thread at a time may use it.

    sockets: a non-blocking stream socket for each peer. failed_address: as for `signal_wait`.
    """

    def __init__(self, sockets: list[socket.socket], failed_address: int) -> None: ...
    def begin(self, sent: Sequence[tuple[int, int]], received: int, room: int) -> None:
        """Begin an exchange: send a message to each peer, and receive one from each.

        sent: the address and the number of bytes of each peer's message, which must not change before the exchange has ended.
        received, room: peer number i sends up to `room` bytes, which are received at address `received` + i * room.
        """

    def go_on(self, seconds: float) -> tuple[int, int]:
        """Send and receive for at most `seconds`. Return (0, -1) if the exchange has ended, (1, -1) if time is over, (2, -1) if
        the group has failed, and (3, number of a peer) if its connection has ended or its message is invalid.
        """

    @property
    def error(self) -> str:
        """The reason of the last result 3 of `go_on`."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def number(self) -> int:
        """The number of exchanges that have begun."""

# csrc/rail_rows.cpp
class RailRows:
    """The rows of an all-to-all in two levels (`weft.runtime.rails_all_to_all`). Arguments are addresses, and numbers of ranks,
    hosts, experts and bytes.

    counts: the number of this rank's rows for each rank and expert, int64 [W, experts].
    received: memory for the number of rows from each rank, [W, experts]; 0 if the caller does not need these numbers.
    expected, out: these numbers and the memory for all rows, in the order of ranks, if the numbers are known; otherwise 0.
    most_bytes: the largest number of bytes of a rank's rows; if a rank has more, messages contain no rows. by_expert: True if
        rows in a rank's memory are ordered by expert and then by rank, False if by rank and then by expert.
    """

    def __init__(
        self, *, counts: int, received: int, expected: int, out: int, world_size: int, experts: int, per_host: int, host: int,
        index: int, row_bytes: int, most_bytes: int, by_expert: bool,
    ) -> None: ...  # fmt: skip
    @property
    def rows(self) -> int:
        """The number of this rank's rows."""

    @property
    def of_experts(self) -> list[int]:
        """The number of this rank's rows for each expert index, summed over the ranks that receive them."""

    @property
    def rows_at(self) -> int:
        """The offset of the rows in a rank's memory."""

    @property
    def head_bytes(self) -> int:
        """The offset of the rows in a message."""

    def load(self, memory: int) -> int:
        """Write `counts` to the address `memory`, this rank's memory. Return the number of rows that the caller must write at
        `rows_at`: 0 if there are too many.
        """

    def pack(self, near: Sequence[int], far: Sequence[int]) -> list[int]:
        """Write the messages to the addresses `far`, from the memory of the ranks of this host, at the addresses `near`. Return
        the number of bytes of each message.
        """

    def go_on(self) -> int:
        """Read the numbers of rows from the ranks of this host. If they are the expected numbers, copy the rows to `out`.
        Return the number of rows.
        """

    def copy_near(self, out: int) -> None:
        """Copy the rows from the ranks of this host to the address `out`."""

    def unpack(self, messages: Sequence[int]) -> None:
        """Read the numbers of rows in the messages from other hosts, in the order of hosts."""

    def copy_far(self) -> int:
        """Copy the rows from other hosts to `out`. Return their number of bytes. Raise ValueError if the numbers of rows were
        not expected.
        """

    @property
    def has_rows(self) -> bool:
        """True if the messages contain rows."""

def reorder_rows(
    *, rows: int, out: int, counts: int, ranks: int, experts: int, row_bytes: int, to_ranks: bool
) -> None:  # fmt: skip
    """Copy rows ordered by rank and then by expert from the address `rows` to the address `out`, ordered by expert and then by
    rank. With `to_ranks`, copy rows ordered by expert to the order of ranks.

    counts: the address of the numbers of rows, int64 [ranks, experts].
    """

def weighted_sum(numbers: int, weights: int, count: int) -> int:
    """Return the sum of `count` 64-bit numbers, each multiplied by its weight, mod 2^64. The arguments are addresses."""

# csrc/group_calls.cpp
class CallLock:
    """A reentrant lock without waiting: `acquire` returns False if another thread holds it."""

    def acquire(self, *, blocking: bool) -> bool: ...
    def release(self) -> None: ...

class CallCounts:
    """The numbers of calls of a group that this rank has begun and ended, and refusals (`weft.symm.calls`).

    running: the lock that a call holds. A nested call, such as a call inside a layer, acquires it again. has_layers:
        True if options of layers wait for the next call. refused_by_peers: {number of a call: the peer's reason}.
    """

    running: CallLock
    begun: int
    ended: int
    unanswered: int
    has_layers: bool
    compile_from: int
    @property
    def refused_by_peers(self) -> dict[int, str]: ...
    def undo_if_refused(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` with `arguments` if the current call raises an error.

        If ranks refuse a call, some of them have stored data about the call, and others have not. So all must undo what they
        have stored.
        """

    def undo(self) -> None:
        """Call the functions that were registered with `undo_if_refused` during the current call, the last first."""

    def keep(self) -> None:
        """Forget these functions, because the current call has ended."""

class FamilySizes:
    """The sizes (numbers of rows) of one problem family that a group has called (`weft.operator.cache.Family`).

    Args:
        passing: the least `once` at which new sizes run unfused.
        most: the largest number of entries of `served`. When reached, the older half is dropped.
    """

    once: int
    unfused_from: int
    unfused_to: int
    def __init__(self, passing: int, most: int) -> None: ...
    @property
    def served(self) -> dict[int, None]: ...
    def waits(self, rows: int, counts: CallCounts) -> bool:
        """True if a call of this size is to run unfused without compilation: the size is new and other sizes have not recurred,
        or the size recurs, but it is too early to compile it (`weft.symm.compilations`).
        """

    def add(self, rows: int) -> bool:
        """Record that a call of this size runs unfused. Return False if that is recorded already."""

class CallDigest:
    """For each of the last `kept` calls, the digest of all calls up to this call, and the digest words of layers
    (`weft.symm.layers`).

    digest, what: the digest after the last `note`, and its text. last: the number of the last call that has ended.
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
    """The failure state of a group, and the time of its watchdog's last check (`looked_at`, by `time.monotonic`). The state
    is stale if the check is more than `stale_s` seconds old.

    failed_address: the address of an int64, which is not 0 once the group has failed or is closed. looks: weak references
        to methods that `is_well` calls first. They make the group fail if they know of a failure that the watchdog has not
        seen yet.
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
    """Return out = (a * scale_a) @ (b * scale_b) + bias. function: `torch._scaled_mm`. out: None for new memory."""

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
        exchange: Callable[..., Any],
        exchange_options: object,
        async_options: object,
    ) -> None: ...

class PlainSteps:
    """GEMMs and collectives of equal parts over whole matrices, one after the other.

    Args:
        buffers: the names of all buffers, inputs first.
        steps: (kind, the buffer that the step writes, the buffers that it reads, dtype) of each step. A step of kind
            "called" has a function in place of the dtype, and calls it with the buffers that it reads. Steps of kind
            "exchange_counts", "exchange_there" and "exchange_back" exchange rows of experts (csrc/plain_steps.hpp).
        world: the number of ranks.
    """

    def __init__(self, torch: TorchCalls, buffers: list[str], steps: list[Any], world: int) -> None: ...
    def run(self, inputs: dict[str, Any], group: object) -> dict[str, Any]:
        """Run all steps. Return all buffers by name."""

# csrc/expert_steps.cpp
def one_gemm_each(experts: int, rows: float, k: int, n: int, item_bytes: int) -> bool:
    """Return the result of `weft.schedule.kernels.LibraryGroupedMatmul.is_one_per_expert`."""

def is_aligned(shape: Sequence[int], strides: Sequence[int], address: int, item_bytes: int) -> bool:
    """True if rows or columns of a matrix, or of matrices, are contiguous and begin at multiples of 16 bytes."""

class KnownNumbers:
    """Finds the numbers of rows of an exchange that the CPU knows.

    Args:
        known: the dict `weft.runtime.unfused.sizes.KNOWN`.
        read: a function that reads the tables received and splits, if the CPU does not know them.
    """

    def __init__(self, known: dict[int, Any], read: Callable[[Any, Any], object]) -> None: ...
    def __call__(self, received: object, splits: object) -> Any:
        """Return the `Numbers` of these tables."""

class ExpertOrders:
    """Finds the permutations of the rows of an exchange on a GPU.

    Args:
        stream: torch's function that returns the current stream of a device.
        orders: a function that computes the permutations, if they are not known on this stream. It is called with (received,
            splits, numbers).
    """

    def __init__(self, torch: TorchCalls, stream: object, orders: Callable[..., object]) -> None: ...
    def __call__(self, received: object, splits: object, numbers: object) -> Any:
        """Return the `weft.runtime.unfused.permutation.Orders` of the exchange; None on CPU."""

class OrderedRows:
    """Sorts rows by expert, or back to the order of arrival.

    Args:
        name: the name of the permutation in `Orders`.
        select: a function that is called with rows on a GPU and the permutation.
        elsewhere: a function that sorts rows on other devices, called with the arguments of `__call__`.
    """

    def __init__(
        self, orders: ExpertOrders, name: str, select: Callable[..., object], elsewhere: Callable[..., object]
    ) -> None: ...
    def __call__(self, rows: object, received: object, splits: object, numbers: object) -> Any:
        """Return the sorted rows."""

class ExpertGemms:
    """The GEMMs of all experts of this rank, over rows in the order of experts. grouped: torch's grouped GEMM."""

    def __init__(self, torch: TorchCalls, orders: ExpertOrders, grouped: Callable[..., Any]) -> None: ...
    def __call__(self, h: object, w: object, received: object, splits: object, numbers: object) -> Any:
        """Return the products of the rows of all experts. Further rows of h are ignored."""

# csrc/replay.cpp
class Recipe:
    """A recipe that makes a value from a call's tensors; written as nested tuples (csrc/recipe.hpp)."""

    def __init__(self, written: tuple[Any, ...]) -> None: ...
    def __call__(self, positional: Sequence[Any], named: dict[str, Any]) -> Any: ...

class CombineSteps:
    """The unfused combine of experts on CPU ranks of one host. Its inputs are h, w, received and splits.

    rows: the number of rows that the caller gives for the result; negative if `splits` tells it. of_received, of_splits: the
    weights of the numbers in these tables (`weft.operator.across`).
    """

    def __init__(
        self, *, torch: TorchCalls, rank: int, world: int, rows: int, of_received: object, of_splits: object
    ) -> None: ...

# csrc/known_run.cpp
class KnownRun:
    """A run of a compiled schedule on a GPU. of: its items, and what they need (`weft.runtime.cuda.issue`)."""

    def __init__(self, of: dict[str, Any]) -> None: ...
    def run(self, inputs: list[Any]) -> list[Any]:
        """Issue a run on the current stream. Return the operator's results."""
    def let_go(self) -> None:
        """Drop all references to the executor's memory. `run` then raises `RuntimeError`."""

# csrc/replay.cpp
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
        looks_at_frames: Callable[[], object],
    ) -> None: ...

class KnownCall:
    """A recorded call, for replay with other tensors.

    Args:
        of: the Python part of the call, a `Replay` or `Passing` (`weft.operator.replay`).
        inputs: a recipe for the list of inputs, in the order of the first buffers of `steps`.
        steps: the steps that run the call; None if Python runs it.
        results: the names of the buffers that the steps return.
        returned: a recipe that makes the function's return value from these buffers.
        usual, captured: True if `steps` runs the call outside, and inside, the capture of a CUDA graph.
    """

    def __init__(
        self,
        of: object,
        surroundings: Surroundings,
        inputs: tuple[Any, ...] | None,
        steps: PlainSteps | CombineSteps | KnownRun | None,
        results: list[str],
        returned: tuple[Any, ...],
        *,
        usual: bool,
        captured: bool,
    ) -> None: ...
    @property
    def is_native(self) -> bool:
        """True if native code makes the call outside of captures."""
    def repeat(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Make the call with other arguments. Return None if the call must take the slow path.

        positional, named: the arguments, whose likeness to the recorded call the caller has checked.
        """

# csrc/pooled_call.cpp
class SlotLease:
    """The owner of a buffer that is lent as a tensor. When it is deleted, it appends `slot` to the list `free`.

    memory: an object that keeps the buffer mapped. slot: the number of the buffer.
    """

    def __init__(self, memory: object, free: list[int], slot: int) -> None: ...

class PooledCall:
    """The launch of a call of embedding_all_to_all that differs from a recorded call only in its ids.

    of: the recorded call, by name (`weft.runtime.cuda.embedding_steady`).
    """

    def __init__(self, of: dict[str, Any]) -> None: ...
    def read(self, features: object, tables: dict[str, Any], gradients: bool) -> Any:
        """Return `features` as a `JaggedInput` if the call is like the recorded call. Otherwise return None.

        tables: the modules of the tables, by name. gradients: True if gradients are enabled; then no tensor may require
            a gradient.
        """

    def launch(self, jagged: object) -> Any:
        """Launch the kernel for an input that `read` has returned. Return the result."""

class UnknownCall:
    """A call that cannot be replayed yet.

    key: the key that equal calls share; None if such calls are never replayed. family: the key that these calls share for
        any number of rows; None if such calls cannot be replayed.
    """

    @property
    def key(self) -> bytes | None: ...
    @property
    def family(self) -> bytes | None: ...

class KnownCalls:
    """The known calls of a function.

    Args:
        calls, families: {key: `KnownCall`, or None for calls that take the slow path}.
        identified: types whose objects are compared by identity.
        unusual: functions that return a true value if a call must not be replayed now, such as inside a dispatch mode.
        forward_ad: the globals of torch.autograd.forward_ad.
        of_size: the name of an argument that the keys of `families` leave out; None if there is no such argument.
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
        of_size: str | None,
    ) -> None: ...
    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Replay an earlier call with these arguments and return its result, or return an `UnknownCall`."""

# csrc/mapping.cpp
class Mapping:
    """A shared, writable mapping of a sealed memfd, with all pages allocated. It ends with the last reference."""

    def __init__(self, fd: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Ask the kernel for huge pages in memory that has not been touched yet. The kernel may ignore the request."""

# csrc/accumulate.cpp
def add_2d(dst: int, dst_pitch: int, src: int, src_pitch: int, cols: int, rows: int, dtype: str) -> None:
    """Add `rows` rows of `cols` elements at address `src` to the elements at `dst`, by one atomic addition per element.

    Several processes and threads may add to the same elements at once. Each addition is rounded to the dtype. dtype:
    "fp32", "bf16", "fp16" or "fp64". Pitches are the bytes from the start of one row to the next. Releases the GIL, and
    ends with a release fence, as `copy_2d` does.
    """

# csrc/copy.cpp
def copy_2d(dst: int, dst_pitch: int, src: int, src_pitch: int, width_bytes: int, rows: int) -> None:
    """Copy `rows` rows of `width_bytes` from address `src` to `dst`. The two must not overlap.

    Pitches are the bytes from the start of one row to the next. If rows are adjacent on both sides, one memcpy copies
    all of them. Releases the GIL. Ends with a release fence: a thread that waits for a signal which this thread sets
    afterwards sees the bytes.

    Raises:
        ValueError: a size is negative, a pitch is less than the width, or there are more than 2^63 bytes.
    """

# csrc/copy_columns.cpp
def copy_columns(pieces: NDArray[np.int64], *, rows: int, n_threads: int) -> None:
    """Copy several pieces, each of `rows` rows, as `copy_2d` does. Row i of all pieces is copied before row i + 1.

    Args:
        pieces: [n, 5], a line for each piece: dst, dst_pitch, src, src_pitch and width_bytes of `copy_2d`.

    Raises:
        ValueError: as `copy_2d`, or `pieces` does not have 5 columns, or `n_threads` is less than 1.
    """

# csrc/stream_program.cpp
class KernelCall:
    """A loaded kernel with its arguments, in the order of its parameters.

    Args:
        function: the driver's handle of the kernel (CUfunction), in the context that is current at a launch.
        programs, threads: the number of blocks (along x), and of threads in each block.
        shared_bytes: the dynamic shared memory of a block.
    """

    def __init__(self, function: int, programs: int, threads: int, shared_bytes: int) -> None: ...
    def number(self, value: int) -> KernelCall:
        """Set the next parameter to `value`, or to its low bytes if the parameter is shorter."""

    def base(self, base: int, offset: int) -> KernelCall:
        """Set the next parameter to an address: that of base number `base`, plus `offset` bytes."""

    def count(self, base: int) -> KernelCall:
        """Set the next parameter to `bases[base]` of each run, a number that is no address, such as a number of rows."""

    def map(
        self,
        *,
        base: int,
        offset: int,
        data_type: int,
        swizzle: int,
        item_bytes: int,
        sizes: list[int],
        strides: list[int],
        box: list[int],
        rows: int,
        instead: int,
        is_sized: bool,
    ) -> KernelCall:
        """Set the next parameter to a tensor map (`cuTensorMapEncodeTiled`), which a run encodes if its address or its number of
        rows differs from the run before.

        Args:
            base, offset: the address, as for the method `base`; with base=-1, `offset` is the address.
            data_type, swizzle: the driver's numbers.
            sizes, strides, box: of the dimensions, innermost first. Strides are in bytes, without that of the innermost.
            rows: the base that holds the number of rows; -1 if the number is fixed.
            instead: the number of the tensor map of this call that replaces this one if there are no rows.
            is_sized: True if the number of rows is the size of the outermost dimension.
        """

    def grid(self, x: int, y: int) -> KernelCall:
        """Read the number of blocks from the bases of each run, in place of `programs`: `bases[x]` blocks along x, and
        `bases[y]` along y.
        """

    def row_tiles(self, rows: int, tile: int, more: int, times: int) -> KernelCall:
        """Compute the number of blocks from a number of rows, `bases[rows]`: (ceil(rows / tile) + more) * times, at least 1 and at
        most `programs`.
        """

    def only_if(self, base: int) -> KernelCall:
        """Launch nothing in runs in which `bases[base]` is 0."""

class StreamProgram:
    """Copies, signals, events and kernels on CUDA streams, recorded once and issued many times with other buffers.

    Operations refer to buffers ("bases"), streams and events by number. `run` gets the addresses and the stream handles.
    Methods that record an operation return its index. They raise ValueError for a number, offset or size out of range.
    Only one thread at a time may use a program.

    Args:
        n_bases, n_streams, n_events: the numbers of bases, streams and events. Events belong to the program, which
            makes them in the current context.
        library: the driver to load.

    Raises:
        RuntimeError: the driver cannot be loaded or lacks a function, or an event cannot be made.
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
        """Record a copy of `rows` rows of `width_bytes`: one plain copy if the rows are adjacent, otherwise one 2D copy.

        Offsets and pitches are in bytes. Source and destination may be in peers' memory. A copy of 0 bytes is not issued.
        """

    def signal(self, stream: int, parts: list[tuple[bool, int, int, int]]) -> int:
        """Record waits and writes, in this order, as one call of the driver. Each is (True for a wait, base, offset, number).

        A wait blocks the stream until the 64-bit word at `base` + `offset` and `number` have a common bit; the offset must
        be a multiple of 8. A write stores the low 32 bits of `number` after all earlier work of the stream; the offset must
        be a multiple of 4. A wait has no deadline: it ends only when the word is written.
        """

    def record(self, stream: int, event: int) -> int:
        """Record the operation that records the event on the stream."""

    def wait_event(self, stream: int, event: int) -> int:
        """Record that the stream waits for the event's latest record."""

    def launch(self, stream: int, calls: list[tuple[int, KernelCall]]) -> int:
        """Record the launch of a kernel. calls: pairs (alignment in bytes, kernel). A run launches the first kernel whose
        address parameters are all multiples of its alignment.

        Raises ValueError if the driver reports that a kernel has a different number of parameters, or other sizes of them.
        """

    def parameters_of(self, function: int) -> list[int]:
        """Return the size of each parameter of a kernel in bytes; empty if the driver (before CUDA 12.4) cannot tell."""

    def __len__(self) -> int: ...
    def run(
        self,
        first: int,
        last: int,
        bases: list[int] | tuple[int, ...],
        streams: list[int] | tuple[int, ...],
    ) -> None:
        """Issue operations [first, last) in the order in which they were recorded. Do not wait for them. Release the GIL.

        Args:
            bases: [n_bases] addresses.
            streams: [n_streams] handles (`torch.cuda.Stream.cuda_stream`); 0 is the legacy default stream.

        Raises:
            ValueError: the range, or the length of `bases` or `streams`, does not match the program, or a number is not
                within 64 bits.
            RuntimeError: the driver refused an operation, after all earlier operations have been issued; or another
                thread is running this program.
        """

# csrc/fluid.cpp
MAX_MIN_LEAST: float
_Amounts: TypeAlias = Sequence[tuple[int, float]]
_Load: TypeAlias = tuple[_Amounts, _Amounts, _Amounts, _Amounts]

def max_min_speeds(
    loads: Sequence[_Load],
    counts: Sequence[int],
) -> list[float]:
    """Return, for each i, the speed (0 to 1) of each of `counts[i]` steps with the load `loads[i]` (`weft.sim.max_min`)."""

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
    """Pool this rank's slots for the global batch, and store each vector in the output of the rank that owns the sample.

    Releases the GIL. Allocates only buffers of its threads. csrc/pooling.hpp defines the order and rounding of sums.

    Args:
        slots: [n, 6], a line for each slot of this rank, in column order: address of the table's first row, rows, dim, key
            (the number of its block of `batch` offsets), first output column in elements, 1 for mean or 0 for sum. Tables
            are row-major.
        values, values_bits, n_values: the address of the indices, their size (32 or 64 bits), and their number.
        offsets, offsets_bits: the address of the offsets, feature-major (keys x batch + 1), and their size (32 or 64 bits).
            They are clamped to ascending numbers from 0 to n_values, so that nothing outside `values` is read.
        per_sample_weights: the address of `n_values` float32 numbers, or 0.
        batch_starts: [W + 1], the first global sample of each rank, then the global batch size.
        outputs: [W], the address of each rank's output [its batch size, output_stride] in this process. 0 means that this
            rank's samples are not pooled.
        output_stride: the elements from one output row to the next.
        dtype: of tables and outputs: 0 fp32, 1 fp16, 2 bf16.
        transport: 0 direct (sets no flags), 1 put.
        remote_first: True to pool the samples of rank + 1, rank + 2, ... first and this rank's samples last; False for
            batch order.
        slice_size: the largest number of vectors in a slice (see `slice_runs`).
        hash: True to read row hash(index) mod rows (weft/embedding/hashing.py). Then no index is bad.
        bounds: 0 ignore (all indices must be in range), 1 warning (a bad index reads a row of zeros and is counted), 2
            fatal (all indices are checked first; if any is bad, nothing is written and no flag is set).
        n_threads: the number of threads that share the work, including the caller's thread.
        flags: [W], for put: the address of this rank's int64 flags in each rank's memory. The flag of slice j of a sample is
            number (sample - batch_starts[destination]) * slices_per_sample + j.
        epoch: the value that is stored in a flag, with release order, after its slice.
        timeline: [capacity, 5] int64 to be filled, or None. A record is: kind (0 if no bytes left this rank, 1 if bytes were
            stored or copied to another rank), thread, start_ns and end_ns (CLOCK_MONOTONIC), bytes that left. Each slice of
            each block of samples has one record, and with put a second one for another rank's samples. These are at most 2
            x slices x (global batch / 32 + W) records if slices are smaller than 128 KiB. Recording costs a few percent.
        isa: one of `isas()`, or "" for the best.

    Returns:
        Eight numbers: the number of bad indices; slot (line of `slots`), sample, position in the bag and value of the first
        bad index (-1, -1, -1, 0 if there is none); the number of slices copied to other ranks; the number of flags set; the
        number of records, which exceeds the timeline's capacity if some were not recorded.

    Raises:
        ValueError: an argument is invalid.
    """

def slice_runs(slots: NDArray[np.int64], slice_size: int) -> list[tuple[int, int, int, int]]:
    """Return the slices of every sample, in the order of their flags: (first slot, slots, first column, columns)."""

def wait_flags(address: int, count: int, epoch: int, deadline_s: float, failed_address: int) -> tuple[int, int, int]:
    """Wait, with acquire order, until each of the `count` int64 flags at `address` has reached `epoch`.

    Return (outcome, index of the first flag that has not, its value). The outcome is as in `signal_wait`.
    """

def isas() -> list[str]:
    """Return the instruction sets that the CPU kernel can use on this machine, best first."""

def isa() -> str:
    """Return the instruction set that the CPU kernel uses by default."""

# csrc/embedding_backward_module.cpp
class SortedRows:
    """The ids of a batch, sorted by table, row, slot, sample and place in the bag, without ids out of range. It keeps no
    reference to the input.

    csrc/embedding_backward.hpp defines the sums and their order.
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
        """Sort the ids. Releases the GIL.

        Args:
            slots: [n, 4], a line for each slot of this rank, in column order: line of `tables`, key (the number of its block
                of `batch` offsets), first column of the gradient in elements, 1 for mean or 0 for sum.
            tables: [t, 2], rows and dim of this rank's tables.
            values, values_bits, n_values, offsets, offsets_bits, per_sample_weights, hash, n_threads: as in
                `embedding_all_to_all`.
            batch: the number of samples in the global batch.

        Raises:
            ValueError: an argument is invalid, or a table has 2**32 bags or more.
        """

    def counts(self) -> list[int]:
        """Return, for each table, the number of distinct rows that occur."""

    def rows(self, table: int, out: int) -> None:
        """Write the distinct rows of a table that occur, ascending, as int64 to address `out`."""

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
        """Reduce the gradient of each row that occurs, and apply a rule to it. Releases the GIL.

        Args:
            memory: [t, 5], a line for each table: the addresses of weight, first state, second state and, for rules 0 and 6,
                output; then the table's number, which seeds its random bits.
            gradients, stride: the address of the gradients [batch, stride], and the elements from one row to the next.
            gradients_dtype, dtype: the dtype of the gradients, and that of the tables and of the output of rule 0: 0 fp32, 1
                fp16, 2 bf16.
            rule: 0 gradient (written to the output), 1 SGD, 2 rowwise Adagrad, 3 Adagrad, 4 Adam, 5 partial rowwise Adam, 6 sum
                of squares of each occurring row's gradient (float32, written to the output).
            sparse: for rule 0, True if the output has a row for each row that occurs, False for each row of the table.
            numbers: learning rate, factor of the gradients, eps, weight decay, beta1, beta2, 1 - beta1, 1 - beta2, Adam's
                two corrections, and the bound to which gradient elements are clamped.
            is_stochastic, seed: True to round 16-bit rows up or down at random, with this seed.
            skip_nonfinite: True to skip rows whose gradient is infinite or NaN.
            isa: one of `isas()`, or "" for the best. Results have the same bits for all.

        Returns:
            The number of skipped rows.
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
    """The parameters of a simulation of T3's memory controller (csrc/memory_controller.hpp). Times are in ns. Bytes are
    those of the whole GPU.
    """

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
    """Simulate all setups together, to the end. Return for each setup the totals by name, and for each time bin the bytes of
    each kind of access.
    """

def sort_pairs(
    function: int, keys: int, sorted_keys: int, values: int, sorted_values: int, *, count: int, bits: int
) -> None:
    """Enqueue a stable sort of `count` int32 keys, each with a value of 32 bits, on torch's current stream. Releases the GIL.

    function: the address of `at::cuda::cub::detail::radix_sort_pairs_impl<int32_t, 4>` in torch's library. An exception of the
        function is raised as RuntimeError.
    keys, sorted_keys, values, sorted_values: addresses in the memory of the current device.
    bits: the number of bits of the largest key. Keys are at least 0.
    """
