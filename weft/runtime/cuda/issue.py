"""The list of a compiled schedule's items, which the CPU issues in order in every run.

An item is (kind, what, where), one of:

- A range [what, where) of native operations, which the program (`_core.StreamProgram`) issues in one call.
- A call of torch or NCCL, a launch of a kernel, or a step of dynamic size (`weft.runtime.cuda.sizes`). `what` is a
  function, and `where` is the lane on whose stream it runs.

The compiler (`weft.runtime.cuda.compile`) records native operations in the program, and adds the other items here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weft import _core
from weft.runtime.cuda.calls import ALIGNMENT, Operation, TorchCall
from weft.runtime.cuda.context import Context, Tensors
from weft.runtime.cuda.move import Stamps
from weft.runtime.cuda.regions import Regions
from weft.timeline import Timeline

_NATIVE, _CALL, _LAUNCH, _DYNAMIC = range(4)


class _Item(NamedTuple):
    kind: int
    what: Any
    where: int


class StreamItems:
    """The list of operations that the CPU issues in every run of a schedule, and the state that is needed to issue them. timed:
    True if each run must record time stamps.
    """

    def __init__(self, context: Context, program: _core.StreamProgram, regions: Regions, timed: bool) -> None:
        self.program, self.bases, self._without_gaps = program, regions.bases, regions.without_gaps
        self.device, self.side = context.device, context.side
        self.items: list[_Item] = []
        self.calls: list[tuple[int, Operation]] = []  # calls of torch and NCCL, for the warm-up
        self.prepares: list[Callable[[Tensors], None]] = []  # functions that load kernels
        self.names = [b.name for b in context.given]
        self._rows_at = list(regions.rows_at.items())
        self.streams = [0, *(s.cuda_stream for s in context.side), context.monitor.cuda_stream]
        self.spans: list[tuple[str, str, int]] = []  # (lane, name, bytes sent)
        self.stamps = Stamps(context.device, 2 * len(context.order) + 2) if timed else None
        self.kept: list[Any] = []  # objects whose memory the program's operations use
        self.joining = (0, 0)  # operations that join the monitor's stream at the end of a capture
        self.leaves_main = False  # True if calls go to streams other than the caller's
        self._native_from = 0

    # --- compiling ---

    def call(self, lane: int, operation: Operation) -> None:
        self._add(_CALL, operation.call, lane)
        self.calls.append((lane, operation))

    def launch(self, lane: int, launch: Callable[[list[int], int], None]) -> None:
        """Add an item that launches a kernel on the stream of `lane`.

        launch: a function that launches the kernel, given the base addresses of a run and the stream's handle.
        """
        self._add(_LAUNCH, launch, lane)

    def dynamic(self, lane: int, what: Callable[[Tensors, list[int]], None]) -> None:
        self._add(_DYNAMIC, what, lane)

    def stamp(self, lane: int, index: int) -> None:
        stamps = self.stamps
        assert stamps is not None
        self.launch(lane, lambda bases, stream: stamps.launch(index, stream))

    def recorded_last(self) -> Callable[[Tensors, list[int]], None]:
        """Return a function for the current run: it issues once more the native operation that was recorded last."""
        last = len(self.program) - 1

        def issue(tensors: Tensors, bases: list[int]) -> None:
            self.program.run(last, last + 1, bases, self.streams)

        return issue

    def flush(self) -> None:
        """Add one item for all native operations that have been recorded since the last item."""
        if len(self.program) > self._native_from:
            self.items.append(_Item(_NATIVE, self._native_from, len(self.program)))
            self._native_from = len(self.program)

    def _add(self, kind: int, what: Any, lane: int) -> None:
        self.flush()
        self.items.append(_Item(kind, what, lane))
        if lane and kind != _LAUNCH:
            self.leaves_main = True

    # --- running ---

    def issue(self, tensors: Tensors, capturing: bool) -> None:
        device, side = self.device, self.side
        bases, streams, program = self.bases, self.streams, self.program
        for i, name in enumerate(self.names):
            tensor = tensors[name]
            bases[i] = (
                0 if callable(tensor) else tensor.data_ptr()
            )  # 0 for an output that is made when its size is known
        for name, at in self._rows_at:
            tensor = tensors[name]
            bases[at] = 0 if callable(tensor) else tensor.shape[0]
        streams[0] = torch._C._cuda_getCurrentRawStream(device.index)
        main: Any = torch.cuda.current_stream(device) if self.leaves_main else None
        for kind, what, where in self.items:
            if kind == _NATIVE:
                program.run(what, where, bases, streams)
                continue
            if kind == _LAUNCH:
                what(bases, streams[where])
                continue
            if where:
                torch.cuda.set_stream(side[where - 1])
            if kind == _CALL:
                what(tensors)
            else:
                what(tensors, bases)
            if where:
                torch.cuda.set_stream(main)
        if capturing:
            program.run(*self.joining, bases, streams)

    def known_run(
        self, inputs: Sequence[str], outputs: Tensors, results: Sequence[str], enter: Callable[[], None],
        broke: Callable[[BaseException], None],
    ) -> _core.KnownRun | None:  # fmt: skip
        """Return the items as an object with which native code issues further runs. Return None if Python must issue an item.

        inputs: the names of the inputs, in the order in which a run gets them.
        outputs: tensors like the outputs, which native code allocates in each run. results: the outputs to return.
        enter: a function that is called before the first item. broke: a function that raises an error again.
        """
        order = {name: number for number, name in enumerate([*inputs, *outputs])}
        if self._rows_at or self.stamps is not None or not order.keys() >= {*self.names, *results}:
            return None
        items: list[tuple[Any, ...]] = []
        for kind, what, where in self.items:
            if kind == _NATIVE:
                items.append(("program", what, where))
            elif kind == _LAUNCH:
                items.append(("launch", what, where))
            elif kind == _CALL and where == 0 and isinstance(what, TorchCall):
                views, out = [view.written(order) for view in what.inputs], what.out
                items.append(
                    ("call", what.function, views, None if out is None else out.written(order), {**what.constants})
                )
            else:
                return None
        return _core.KnownRun({
            "items": items, "run_program": self.program.run, "bases": self.bases, "streams": self.streams,
            "inputs": len(inputs), "outputs": [(tuple(out.shape), out.dtype) for out in outputs.values()],
            "addressed": [order[name] for name in self.names], "results": [order[name] for name in results],
            "empty": torch.empty, "device": self.device, "device_number": self.device.index,
            "stream_of": torch._C._cuda_getCurrentRawStream, "enter": enter, "broke": broke,
        })  # fmt: skip

    def warm_up(self, tensors: Tensors, first: bool = True) -> None:
        """Load all kernels. Run each call of torch and NCCL once, on its stream, with the current contents of memory. If
        several calls launch the same kernel, run only one of them.

        first: True for the first warm-up, which all ranks make together. Later warm-ups omit collectives.

        Peers may already run the schedule during the warm-up, so the calls must not change memory that peers read or write
        (`Operation.aside`).
        """
        for name in self._without_gaps:
            if not callable(t := tensors[name]) and not t.is_contiguous():
                raise ValueError(
                    f"buffer {name} is {tuple(t.shape)} with strides {t.stride()}: pass {name}.contiguous(), since "
                    f"its rows are copied or reduced in place"
                )
        main = torch.cuda.current_stream(self.device)
        for prepare in self.prepares:
            prepare(tensors)
        done = set()
        for where, operation in self.calls:
            if operation.meets and not first:
                continue
            if operation.what is not None:
                operands = [view(tensors) for view in operation.views]
                like = (
                    where,
                    operation.what,
                    *((x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT) for x in operands),
                )
                if like in done:
                    continue
                done.add(like)
            with torch.cuda.stream(self.side[where - 1] if where else main):
                (operation.aside or operation.call)(tensors)
            torch.cuda.synchronize(self.device)

    def read(self, timeline: Timeline, rank: int) -> None:
        """Append the time spans of the last run's steps to `timeline`. The device must have finished the run."""
        assert self.stamps is not None
        times = self.stamps.times.tolist()
        for i, (lane, name, sent) in enumerate(self.spans):
            timeline.add(rank, lane, name, times[2 * i] / 1e3, max(times[2 * i : 2 * i + 2]) / 1e3, sent)
