"""The input distribution: send the ids of this rank's samples to the ranks that own the tables.

Before it, a rank has the features of all tables for its own samples. After it, a rank has the features of its own
tables for the samples of all ranks.

As in TorchRec's table-wise sharding, there are two rounds of all-to-alls. The first round exchanges headers: the batch
size and the number of ids of each feature. Then the CPU waits once for the device. The second round sends lengths, ids
and weights. Ids arrive grouped by source rank. They are then regrouped by feature, with samples in rank order, as
`weft.embedding_all_to_all` reads them.

On GPUs one kernel writes a message for each destination, and another kernel unpacks the received messages
(`weft.kernels.input_dist`). On GPUs of one host a kernel also exchanges the headers, from the second batch on. On CPU, and
in a group of one rank, lengths, ids and weights are separate tensors.

A rank that refuses its input sets a mark in its header. Its peers then raise too, and do not wait for its ids.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from weft import symm
from weft.arguments import check_tensor, checked_deadline
from weft.embedding.check import missing_feature
from weft.embedding.jagged import INDEX_DTYPES, JaggedInput, check_keyed, offsets_of, wrong_range
from weft.embedding.tables import EmbeddingSharding
from weft.errors import DisagreementError, RefusedError
from weft.nn.boxed_ids import BoxedBatch, BoxedIds, IdBound
from weft.nn.id_batches import HEAD, BegunBatch, Exchange, Layout, LocalBatch, Route, SentBatch
from weft.nn.number_exchange import NumberExchange
from weft.operator.derivatives import once
from weft.operator.together import together
from weft.runtime.collectives import all_to_all_single
from weft.runtime.opaque import opaque
from weft.runtime.unfused.turn import turn_on
from weft.words import by_rank, counted


class InputDist:
    """The input distribution for a sharding, a group and a device.

    All ranks must make every call. `begin`, `send` and `arrive` are the three stages of a call. Other work may run
    between the stages.

    deadline_s: the longest wait for a peer, in seconds. The default is WEFT_DEADLINE_S on CPU, and the process group's
        timeout on GPUs. On GPUs this deadline applies to headers that a kernel exchanges, and to the error texts of refused
        inputs. The group's timeout applies to all-to-alls of NCCL.
    """

    def __init__(
        self,
        sharding: EmbeddingSharding,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        is_weighted: bool,
        deadline_s: float | None = None,
        bound: IdBound | None = None,
    ) -> None:
        self.sharding, self.group, self.device, self.is_weighted = sharding, group, device, is_weighted
        self.deadline_s = checked_deadline(deadline_s)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # A feature is sent to a rank once, even if several tables there use it.
        self.features_of_rank = tuple(
            tuple(dict.fromkeys(slot.feature for slot in sharding.local_slots(rank))) for rank in range(self.world_size)
        )
        # Ranks compare this text before they exchange anything: headers for different features would have different
        # sizes.
        digest = hashlib.blake2b(repr((self.features_of_rank, is_weighted)).encode(), digest_size=6).hexdigest()
        self._what = f"the input distribution of {counted(len(sharding.tables), 'table')} ({digest})"
        self._layout: Layout | None = None
        self._is_packed = device.type == "cuda" and self.world_size > 1
        self._words = [HEAD + len(features) for features in self.features_of_rank]
        """The number of words of the header for each rank."""
        self._by_kernel = NumberExchange(group, device, self._words, self.deadline_s)
        self._bound = bound
        self._boxed: BoxedIds | None = None
        if bound is not None and self._is_packed:
            self._boxed = BoxedIds(group, device, self.features_of_rank, is_weighted, bound, self._by_kernel)

    @opaque
    def __call__(self, features: Any, refusal: Exception | None = None) -> tuple[JaggedInput, tuple[int, ...]]:
        """Return the features of this rank's tables for the global batch, and every rank's batch size.

        Keys without a table are dropped. The bags must hold all ids. Raises `RefusedError` (a `ValueError`) on every
        rank, with the reason, if any rank's input is bad. Raises `DisagreementError` if ids are int32 on one rank and
        int64 on another.

        features: a KeyedJaggedTensor (weft's or TorchRec's) of this rank's samples. Ranks may have different batch
            sizes.
        refusal: an error that the caller has already found, to report to the other ranks.
        """
        return self.arrive(self.send(self.begin(features, refusal)))

    @property
    def needs_no_cpu(self) -> bool:
        """True if the next batch will be exchanged without the CPU (`BoxedIds`), so that its numbers of ids need no check."""
        return self._boxed is not None and self._boxed.is_ready

    def begin(self, features: Any, refusal: Exception | None = None) -> BegunBatch | BoxedBatch:
        """Begin the exchange of batch sizes and numbers of ids. `send` raises errors about the input, and `refusal`
        (see `__call__`).

        If the next batch needs no CPU, exchange its ids too, and raise errors here.
        """
        if self._boxed is not None and self._boxed.is_ready:
            if refusal is not None:
                raise refusal
            return self._boxed.run(self._read(features))
        local = None
        try:
            local = self._read(features) if refusal is None else None
        except Exception as error:  # any error is reported to the other ranks
            refusal = error
        return BegunBatch(local, refusal, *self._begin_headers(local))

    def send(self, begun: BegunBatch | BoxedBatch) -> SentBatch | BoxedBatch:
        """Wait for the headers (batch sizes and numbers of ids) from all ranks, and begin to exchange the ids."""
        if isinstance(begun, BoxedBatch):
            return begun
        local, refusal = begun.local, begun.refusal
        heads, own = self._end_headers(begun)
        if any(head[0] for head in heads):
            if local is not None and own[0]:
                refusal = ValueError(self._bad_lengths(local))
            self._raise_refusals(refusal)
        for rank, (_, bits, *_) in enumerate(heads):
            if bits != heads[0][1]:
                raise DisagreementError(
                    f"ids are int{heads[0][1]} on rank 0 and int{bits} on rank {rank}: use one dtype on all ranks"
                )
        assert local is not None
        return self._begin_features(local, begun.numbers, heads, own)

    def arrive(self, sent: SentBatch | BoxedBatch) -> tuple[JaggedInput, tuple[int, ...]]:
        """Wait for the ids from all ranks. Return the results that `__call__` documents."""
        if isinstance(sent, BoxedBatch):
            return sent
        jagged, weights = self._end_features(sent), sent.local.weights
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            jagged = jagged._replace(weights=_Arrived.apply(weights, jagged.weights, self, sent.route))
        return jagged, tuple(head[2] for head in sent.route.heads)

    def weights_back(self, grad: torch.Tensor, like: torch.Tensor, route: Route) -> torch.Tensor:
        """Return the gradient of this rank's per-sample weights. All ranks must make this call.

        grad: the gradient of the weights that arrived on this rank.
        like: this rank's own weights.
        route: the numbers of ids that were sent in forward.
        """
        order, ids = route.order, route.ids
        backwards = sorted(range(len(order)), key=order.__getitem__)
        by_source = _reordered(grad.resolve_neg(), [ids[i] for i in order], backwards)
        (returned,) = self._all_to_all(
            "gradients of weights", [by_source.contiguous()], [route.ids_in], [route.ids_out]
        ).wait()
        total = torch.zeros_like(like)
        starts = list(accumulate(route.counts, initial=route.begin))
        for block, piece in zip(route.blocks, returned.split([route.counts[b] for b in route.blocks]), strict=True):
            total[starts[block] : starts[block + 1]] += (
                piece  # summed, because a feature may have been sent to several ranks
            )
        return total

    def _read(self, features: Any) -> LocalBatch:
        check_keyed(features)
        keys, batch_size = tuple(features.keys()), features.stride()
        values, lengths, weights = features.values(), features.lengths(), features.weights_or_none()
        # Read offsets only if they exist already: making them from lengths takes a kernel, and they would begin at 0.
        offsets = getattr(features, "offsets_or_none", features.offsets)()
        if isinstance(offsets, torch.Tensor) and offsets.numel() == 0:  # TorchRec represents zero bags like this
            offsets = None
        if self._layout is None or self._layout.keys != keys:
            self._layout = self._lay_out(keys)
        if not self.is_weighted:
            weights = None
        elif weights is None:
            raise ValueError("is_weighted=True but the features have no weights: pass one float32 weight per value")
        named = [("values", values, INDEX_DTYPES), ("lengths", lengths, INDEX_DTYPES)]
        named += [] if offsets is None else [("offsets", offsets, INDEX_DTYPES)]
        for name, tensor, dtypes in named if weights is None else [*named, ("weights", weights, (torch.float32,))]:
            check_tensor(name, tensor)
            if tensor.dim() != 1 and name != "lengths":
                raise ValueError(f"{name} has shape {list(tensor.shape)}: pass a one-dimensional tensor")
            if not tensor.is_contiguous() and name != "offsets":
                raise ValueError(f"{name} has strides {tensor.stride()}: pass {name}.contiguous()")
            if tensor.dtype not in dtypes:
                raise ValueError(f"{name} is {tensor.dtype}: pass {' or '.join(map(str, dtypes))}")
            if tensor.device != self.device:
                raise ValueError(
                    f"{name} is on {tensor.device} but the tables are on {self.device}: move the features there"
                )
        if lengths.numel() != len(keys) * batch_size:
            raise ValueError(
                f"{counted(lengths.numel(), 'length')} for {counted(len(keys), 'key')} x {counted(batch_size, 'sample')}: "
                "pass one length per bag"
            )
        if weights is not None and weights.numel() != values.numel():
            raise ValueError(
                f"{counted(weights.numel(), 'weight')} for {counted(values.numel(), 'value')}: pass one weight per value"
            )
        if values.numel() >= 2**31:
            raise ValueError(
                f"the batch has {values.numel()} ids, but at most 2**31 - 1 are allowed on a rank: use a smaller batch"
            )
        if self._bound is not None:
            self._bound.check(batch_size, weights)
        if weights is not None:
            weights = weights.resolve_neg()  # exchanges copy the memory, which holds the negated values of such a view
        return LocalBatch(self._layout, values, lengths, offsets, weights, batch_size)

    def _lay_out(self, keys: tuple[str, ...]) -> Layout:
        block_of_key = {key: block for block, key in enumerate(keys)}
        for slot in self.sharding.slots:
            if slot.feature not in block_of_key:
                raise ValueError(missing_feature(slot, keys, self.sharding))
        blocks = [[block_of_key[feature] for feature in features] for features in self.features_of_rank]
        header = [word for own in blocks for word in (*range(HEAD), *(HEAD + block for block in own))]
        flat = tuple(block for own in blocks for block in own)
        pieces = None
        if self._is_packed:
            from weft.runtime.cuda.input_dist import Pieces

            ranks = [rank for rank, own in enumerate(blocks) for _ in own]
            pieces = Pieces(*torch.tensor([flat, ranks], device=self.device))
        return Layout(keys, flat, torch.tensor(header, dtype=torch.int64, device=self.device), pieces)

    def _begin_headers(self, local: LocalBatch | None) -> tuple[torch.Tensor, Exchange]:
        """Begin to exchange headers (batch sizes and numbers of ids). Return (the tensor `BegunBatch.numbers`, the exchange to
        wait for).

        local: this rank's samples; None if this rank refuses its input.
        """
        mine = self._words[self.rank]
        arrive = self.world_size * mine
        size = HEAD if local is None else HEAD + len(local.layout.keys) + 1
        numbers = torch.empty(arrive + size, dtype=torch.int64, device=self.device)
        own = numbers[arrive:]
        if local is None:
            own.zero_()[0] = 1
            send = torch.cat([torch.nn.functional.pad(own, (0, count - HEAD)) for count in self._words])
        elif self._is_packed:
            from weft.runtime.cuda.input_dist import header

            of_keys = len(local.layout.keys), local.batch_size
            index, is_padded = local.layout.header_index, self._bound is not None
            send = header(local.lengths, local.offsets, *of_keys, local.values, index, own, is_padded)
        else:
            counts = local.lengths.view(len(local.layout.keys), local.batch_size).sum(1, dtype=torch.int64)
            count = local.values.numel()
            known = [local.values.dtype.itemsize * 8, local.batch_size, 0]
            sizes, begin = torch.tensor(known, device=self.device).split(2)
            total = counts.sum()
            wrong = total != count if self._bound is None else total > count
            if local.offsets is not None:
                begin, end = local.offsets[:1].to(torch.int64), local.offsets[-1:]
                wrong = (begin != 0) | wrong | (end - begin != total)
            # A length greater than the number of values would overflow sums and int32.
            refused = ((local.lengths < 0) | (local.lengths > count)).any() | wrong
            torch.cat([refused.to(torch.int64).view(1), sizes, counts, begin], out=own)
            send = own[local.layout.header_index]
        into = numbers[:arrive]
        if self._by_kernel.is_ready:
            self._by_kernel.run(send, into)
            return numbers, Exchange([into], [])
        return numbers, self._all_to_all("numbers", [send], [self._words], [[mine] * self.world_size], [into])

    def _end_headers(self, begun: BegunBatch) -> tuple[list[list[int]], list[int]]:
        """Wait for the headers (batch size, number of ids of each feature). Return the headers that all ranks sent to this
        rank, and this rank's own header.
        """
        mine = self._words[self.rank]
        begun.headers.wait()
        host = begun.numbers.tolist()  # the only wait for the device
        self._by_kernel.arrived()
        return [host[s * mine : (s + 1) * mine] for s in range(self.world_size)], host[self.world_size * mine :]

    def _begin_features(
        self, local: LocalBatch, numbers: torch.Tensor, heads: list[list[int]], own: list[int]
    ) -> SentBatch:
        blocks, batch_size = local.layout.blocks, local.batch_size
        counts, begin = own[HEAD:-1], own[-1]
        features = self.features_of_rank[self.rank]
        ends = list(accumulate((len(names) for names in self.features_of_rank), initial=0))
        ids_out = [sum(counts[block] for block in blocks[first:last]) for first, last in pairwise(ends)]
        ids_in = [sum(head[HEAD:]) for head in heads]
        bags_out = [len(names) * batch_size for names in self.features_of_rank]
        bags_in = [len(features) * head[2] for head in heads]
        route = Route(blocks, counts, begin, ids_out, ids_in, heads)
        if self._is_packed:
            from weft.runtime.cuda.input_dist import pack

            words = local.values.itemsize // 4 + (local.weights is not None)
            sent = [ids * words + bags for ids, bags in zip(ids_out, bags_out, strict=True)]
            arriving = [ids * words + bags for ids, bags in zip(ids_in, bags_in, strict=True)]
            mine, pieces = numbers[len(numbers) - len(own) :], local.layout.pieces
            message = pack(local.values, local.lengths, local.weights, mine, pieces, batch_size, sum(sent))
            return SentBatch(local, numbers, route, self._all_to_all("features", [message], [sent], [arriving]))
        bags = slice(begin, begin + sum(counts))
        lengths = local.lengths.to(torch.int32).view(len(local.layout.keys), batch_size)
        in_order = blocks == tuple(range(len(lengths)))
        send = [
            (lengths if in_order else lengths[list(blocks)]).flatten(),
            _reordered(local.values[bags], counts, blocks),
            *([] if local.weights is None else [_reordered(local.weights[bags], counts, blocks)]),
        ]
        out, into = [bags_out, ids_out, ids_out], [bags_in, ids_in, ids_in]
        exchange = self._all_to_all("features", send, out[: len(send)], into[: len(send)])
        return SentBatch(local, numbers, route, exchange)

    def _end_features(self, sent: SentBatch) -> JaggedInput:
        features, route = self.features_of_rank[self.rank], sent.route
        heads, received = route.heads, sent.features.wait()
        stride = sum(head[2] for head in heads)
        if self._is_packed and features:
            from weft.runtime.cuda.input_dist import unpack

            sizes = len(heads), len(features), sum(route.ids_in), len(features) * stride
            of_ids = sent.local.values.dtype, sent.local.weights is not None
            values, offsets, weights = unpack(received[0], sent.numbers, *sizes, *of_ids)
            return JaggedInput(features, values, offsets, weights, stride=stride)
        if not features:
            none = sent.local.weights if sent.local.weights is None else sent.local.weights[:0]
            return JaggedInput(features, sent.local.values[:0], offsets_of(sent.local.lengths[:0]), none, stride=stride)
        ids, order = route.ids, route.order
        by_source = zip(received[0].split([len(features) * head[2] for head in heads]), heads, strict=True)
        lengths = torch.cat([some.view(len(features), head[2]) for some, head in by_source], dim=1)
        return JaggedInput(
            features,
            _reordered(received[1], ids, order),
            offsets_of(lengths.flatten()),
            None if sent.local.weights is None else _reordered(received[2], ids, order),
            stride=stride,
        )

    def _all_to_all(
        self, what: str, send: Sequence[torch.Tensor], out: Sequence[list[int]], into: Sequence[list[int]],
        received: list[torch.Tensor] | None = None,
    ) -> Exchange:  # fmt: skip
        """Begin an all-to-all for each tensor in `send`.

        what: the data, for error texts.
        out[i]: the number of elements of `send[i]` for each rank.
        into[i]: the number of elements that arrive from each rank.
        received: the tensors to receive into. None: new tensors.
        """
        if self.world_size == 1:
            if received is not None:
                torch._foreach_copy_(received, list(send))
            return Exchange(list(send), [])
        if received is None:
            received = [tensor.new_empty(sum(splits)) for tensor, splits in zip(send, into, strict=True)]
        turn = turn_on(self.group, self.device, self._what, self.deadline_s)
        if self.device.type == "cuda":  # in stream order: an asynchronous call takes more CPU time
            for i, parts in enumerate(zip(received, send, into, out, strict=True)):
                turn.run(f"all-to-all {i} of {what}", all_to_all_single, *parts, group=self.group)
            return Exchange(received, [])
        works = [
            turn.begin(f"all-to-all {i} of {what}", all_to_all_single, *parts, group=self.group)
            for i, parts in enumerate(zip(received, send, into, out, strict=True))
        ]
        return Exchange(received, works)

    def _bad_lengths(self, local: LocalBatch) -> str:
        """Return the error text for lengths or offsets that the check on the device has refused. Either a length is
        negative, or the lengths do not match the number of values.
        """
        negative = (local.lengths < 0).nonzero()
        if negative.numel():
            block, sample = divmod(int(negative[0]), local.batch_size)
            feature = local.layout.keys[block]
            tables = [self.sharding.tables[s.table].name for s in self.sharding.slots if s.feature == feature]
            return (
                f"feature {feature!r} (tables {tables}), sample {sample}: length {int(local.lengths[negative[0]])} is "
                f"negative: a bag has 0 or more ids, so offsets must ascend"
            )
        total, count = sum(local.lengths.flatten().tolist()), local.values.numel()
        if local.offsets is None:
            return wrong_range(0, total, count, True)
        begin, end = int(local.offsets[0]), int(local.offsets[-1])
        if end - begin != total:
            return f"lengths sum to {total} but offsets go from {begin} to {end}: pass only one of them"
        return wrong_range(begin, end, count, False)

    def _raise_refusals(self, refusal: Exception | None) -> None:
        """Exchange the error texts of all ranks, and raise them on every rank. All ranks must make this call.

        refusal: this rank's error; None if only other ranks refuse.
        """
        mine = None if refusal is None else str(refusal)
        comm = symm.communicator(self.group, self.device, deadline_s=self.deadline_s)
        texts = comm.all_gather(mine, what="refusals of an input", deadline_s=self.deadline_s)
        reasons = by_rank((rank, text) for rank, text in enumerate(texts) if text is not None)
        raise RefusedError(f"input refused by {reasons}") from refusal


class _Arrived(torch.autograd.Function):
    """An autograd function that returns the per-sample weights that this rank received. Its backward, which all ranks must run,
    sends their gradients back to the ranks of the samples.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, own: torch.Tensor, arrived: torch.Tensor, distribution: InputDist, route: Route
    ) -> torch.Tensor:
        ctx.distribution, ctx.route = distribution, route
        ctx.save_for_backward(own)
        return arrived.view_as(arrived)

    @staticmethod
    @once("ShardedEmbeddingBagCollection", lambda ctx: ctx.distribution.group)
    def backward(ctx: Any, saved: Sequence[torch.Tensor], grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        distribution, like = ctx.distribution, saved[0]
        what = "backward of ShardedEmbeddingBagCollection"
        with together(what, distribution.group, like, distribution.deadline_s):
            return distribution.weights_back(grad, like, ctx.route), None, None, None


_made: weakref.WeakValueDictionary[tuple[Any, ...], InputDist] = weakref.WeakValueDictionary()


def input_dist_of(
    sharding: EmbeddingSharding, group: dist.ProcessGroup, device: torch.device, is_weighted: bool, deadline_s: float | None,
    bound: IdBound | None = None,
) -> InputDist:  # fmt: skip
    """Return the input distribution for these arguments. All modules with equal arguments share it."""
    key = sharding.written, group.group_name, device, is_weighted, deadline_s, bound
    made = _made.get(key)
    if made is None or made.group is not group:
        made = _made[key] = InputDist(
            sharding, group, device, is_weighted=is_weighted, deadline_s=deadline_s, bound=bound
        )
    return made


def _reordered(flat: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Split `flat` into blocks of `sizes`, and concatenate the blocks with the indices `order`.

    `order` may omit and repeat blocks. If it changes nothing, return `flat` itself.
    """
    if list(order) == list(range(len(sizes))):
        return flat
    blocks = flat.split(list(sizes))
    return torch.cat([blocks[i] for i in order]) if order else flat[:0]
