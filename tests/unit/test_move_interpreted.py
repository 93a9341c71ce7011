"""The copy kernel under Triton's interpreter: several parts or several targets, sizes known at run time, flags.
`tests/support/interpreted.py` says how."""

from __future__ import annotations

import torch
from support.interpreted import drawn, play_all, wrong_in


def play(seed: int) -> None:
    """Compare with slices. The memory around the rows does not change, and parts that do not fit are left out."""
    import triton.language as tl

    from weft.kernels.move import move_kernel
    from weft.kernels.signals import FLAG

    g, number = drawn(seed)
    dynamic, early, gaps = seed % 2 == 1, number(0, 2), number(0, 2)
    width, room, count = 8 * number(1, 40), number(8, 30), number(1, 5)
    source = torch.randint(0, 2**15, (room + 2, width + 8 * gaps * number(0, 3)), dtype=torch.int16, generator=g)
    boxes = [
        torch.full((room, width + 8 * gaps), -1, dtype=torch.int16) if n == 0 or number(0, 2) else None
        for n in range(count)
    ]  # None: the part goes into the first box
    first_box = torch.cat([boxes[0], boxes[0]])  # the second half is for parts with a target relative to the first
    boxes[0] = first_box[:room]
    wanted = [None if box is None else box.clone() for box in boxes]
    wanted_second = first_box[room:].clone()
    rows = number(1, room)
    sizes = torch.tensor([(number(0, room // 2), number(0, room // 2), number(0, room // 2)) for _ in range(count)])
    if dynamic and number(0, 2):
        sizes[-1] = torch.tensor([(-1, 0, 2), (0, -3, 2), (2**40, 0, 1), (0, 0, -5)][number(0, 4)])
    parts, item = [], source.element_size()
    for n, box in enumerate(boxes):
        begin = 0 if dynamic else number(0, room - rows + 1)
        inner = first_box[room:] if box is None else box
        result = wanted_second if box is None else wanted[n]
        here, there, some = sizes[n].tolist() if dynamic else (begin, 0, rows)
        some = some if 0 <= here <= room and 0 <= there <= room else 0
        some = max(0, min(some, room - there, room - here))
        if some:
            result[there : there + some, :width] = source[here : here + some, :width]
        at = begin * source.stride(0) * item
        place = (inner.data_ptr() - first_box.data_ptr(), 1) if box is None else (inner.data_ptr(), 0)
        parts.append((at, *place, sizes[n].data_ptr() if dynamic else 0))
    first_at, *_ = parts[0]
    table = torch.tensor([(at - first_at, *rest) for at, *rest in parts[1:]] or [(0, 0, 0, 0)])
    flags, arrivals, nothing = torch.tensor([0, 0, FLAG]), torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    addresses = torch.tensor([flags[i:].data_ptr() for i in range(3)])
    empty = (nothing.to(torch.int64), 0)
    move_kernel[(number(1, 5),)](
        source.data_ptr() + first_at, first_box.data_ptr(), room if dynamic else rows, width, source.stride(0),
        first_box.stride(0), *empty, table, len(parts) - 1, *empty, addresses[2:], 1, addresses, 2, *empty, *empty, *empty,
        *empty, arrivals, parts[0][3], room, early, ITEM=tl.int16, BLOCK=64, ALIGN=8, ADD=False, PTX=False,
    )  # fmt: skip
    for box, result in zip(boxes, wanted, strict=True):
        assert box is None or torch.equal(box, result)
    assert torch.equal(first_box[room:], wanted_second)
    assert flags.tolist() == [FLAG, FLAG, 0]
    assert arrivals.item() == 0


RUNS = {str(seed): lambda seed=seed: play(seed) for seed in range(12)}


def test_interpreted() -> None:
    assert wrong_in(__file__, RUNS) == {}


if __name__ == "__main__":
    play_all(RUNS)
