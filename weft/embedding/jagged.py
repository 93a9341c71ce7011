"""Sparse features and pooled vectors by name, as small classes with the interface of TorchRec's containers.

Jagged means that samples have different numbers of ids. With T keys and B samples, the bag of key t and sample b is
`values[offsets[t * B + b] : offsets[t * B + b + 1]]`. So all samples of the first key come first (feature-major).
`as_jagged` reads weft's containers, TorchRec's own, or a tuple of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from weft.arguments import MOST_ROWS, check_tensor, checked_shape, checked_within, iterated
from weft.words import counted, kind

INDEX_DTYPES = (torch.int32, torch.int64)


class JaggedInput(NamedTuple):
    """The tensors that kernels read: `values` [N], `offsets` [T * B + 1], `weights` [N] or None, and the T keys or
    None.

    stride: B, if the container knows it, otherwise None. Required if T = 0.
    from_lengths: True if the container has lengths and no offsets, for error texts.
    """

    keys: tuple[str, ...] | None
    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    stride: int | None = None
    from_lengths: bool = False


class JaggedTensor:
    """The bags of one key: `values` [n], `offsets` [B + 1] from 0, `weights` [n] or None."""

    def __init__(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self._values, self._offsets, self._weights = values, offsets, weights

    def values(self) -> torch.Tensor:
        return self._values

    def offsets(self) -> torch.Tensor:
        return self._offsets

    def lengths(self) -> torch.Tensor:
        return self._offsets.diff()

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def to_dense(self) -> list[torch.Tensor]:
        """Return the bags as B tensors, which are views."""
        ends = self._offsets.tolist()
        return [self._values[begin:end] for begin, end in pairwise(ends)]


class KeyedJaggedTensor:
    """Bags of ids for T named features and B samples, feature-major, with the fields and methods of TorchRec's class.

    keys: the T feature names. Every key has the same B: TorchRec's variable stride per key is not supported.
    values: the ids of all bags, [N] int32 or int64.
    weights: a weight for each id, [N] float32, or None.
    lengths: the number of ids in each bag, [T * B] int32 or int64.
    offsets: the position in `values` where each bag begins, and the end of the last bag, [T * B + 1] int32 or int64.
        Pass lengths, offsets, or both. If you pass both, they must describe the same bags.
    stride: the number of samples, B. Required only if there are no keys.

    The bags must hold all values: offsets ascend from 0 to N, and lengths sum to N. Lookups and pooling on CPU refuse
    other bags. On GPUs a full check would wait for the device. So the caller must ensure that bags are valid. For a
    local batch weft checks only the signs and the sum of lengths, and the first and last offset.

    At their first use, `sync`, `offset_per_key`, `length_per_key`, `permute`, `[key]` and `to_dict` copy from a GPU and
    wait for it. Other methods do neither.

    Raises `ValueError` for duplicate keys and for sizes that do not match, and `TypeError` for keys that are not strings
    and values that are not tensors. `[key]` raises `KeyError`. Pooling checks dtypes and contents.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        self._keys = _names(keys)
        given = {"values": values, "weights": weights, "lengths": lengths, "offsets": offsets}
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "values"):
                raise TypeError(f"{name} is {kind(tensor)}: pass a tensor")
        if lengths is None and offsets is None:
            raise ValueError("lengths and offsets are both None: pass lengths [T * B] or offsets [T * B + 1]")
        bags = lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]
        if lengths is not None and offsets is not None and offsets.numel() != bags + 1:
            raise ValueError(
                f"{counted(offsets.numel(), 'offset')} for {counted(bags, 'length')}: pass {counted(bags + 1, 'offset')}, or "
                "lengths alone"
            )
        if stride is None:
            if not self._keys:
                raise ValueError("a KeyedJaggedTensor without keys has no known batch size: pass stride=")
            if bags % len(self._keys) or bags < 0:
                raise ValueError(
                    f"{counted(max(bags, 0), 'bag')} for {counted(len(self._keys), 'key')}: every key needs the same number "
                    f"B of samples, so pass {len(self._keys)} * B lengths, or {len(self._keys)} * B + 1 offsets"
                )
            stride = bags // len(self._keys)
        elif type(stride) is not int:
            stride = checked_within("stride", stride, 0, MOST_ROWS, "a number of samples, 0 or more")
        if bags != stride * len(self._keys):
            raise ValueError(
                f"stride={stride} and {counted(len(self._keys), 'key')} mean "
                f"{counted(stride * len(self._keys), 'bag')}, but there are {bags}: pass a stride that matches"
            )
        if weights is not None and weights.numel() != values.numel():
            raise ValueError(
                f"{counted(weights.numel(), 'weight')} for {counted(values.numel(), 'value')}: pass one weight per value"
            )
        self._values, self._weights, self._stride = values, weights, stride
        self._lengths, self._offsets = lengths, offsets
        self._given_lengths, self._given_offsets = lengths, offsets
        self._offset_per_key: list[int] | None = None

    @classmethod
    def from_lengths_sync(
        cls,
        keys: Sequence[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> KeyedJaggedTensor:
        """Return a KeyedJaggedTensor from lengths, with `offset_per_key` already on the CPU."""
        return cls(keys, values, weights, lengths=lengths, stride=stride).sync()

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
    ) -> KeyedJaggedTensor:
        """Return a KeyedJaggedTensor from offsets, with `offset_per_key` already on the CPU."""
        return cls(keys, values, weights, offsets=offsets, stride=stride).sync()

    def sync(self) -> KeyedJaggedTensor:
        """Copy `offset_per_key` to the CPU, unless it is there already."""
        self.offset_per_key()
        return self

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def weights(self) -> torch.Tensor:
        if self._weights is None:
            raise ValueError(
                "this KeyedJaggedTensor has no weights: call weights_or_none(), which returns None instead of raising"
            )
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def lengths(self) -> torch.Tensor:
        """Return the number of ids in each bag, [T * B]."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets.diff()
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Return the position in `values` where each bag begins, and the end of the last bag, [T * B + 1]."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = offsets_of(self._lengths)
        return self._offsets

    def lengths_or_none(self) -> torch.Tensor | None:
        """Return the lengths that were passed to the constructor; None if only offsets were passed."""
        return self._given_lengths

    def offsets_or_none(self) -> torch.Tensor | None:
        """Return the offsets that were passed to the constructor; None if only lengths were passed."""
        return self._given_offsets

    def stride(self) -> int:
        """Return B, the number of samples."""
        return self._stride

    def offset_per_key(self) -> list[int]:
        """Return T + 1 positions in `values`: the start of each key's ids, and the end of the last key's ids."""
        if self._offset_per_key is None:
            bags = len(self._keys) * self._stride
            at = torch.arange(len(self._keys) + 1, device=self._values.device) * self._stride
            self._offset_per_key = self.offsets()[at].tolist() if bags else [0] * (len(self._keys) + 1)
        return self._offset_per_key

    def length_per_key(self) -> list[int]:
        """Return the number of ids of each key, over all samples."""
        return [end - begin for begin, end in pairwise(self.offset_per_key())]

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """Return a copy with only the keys numbered `indices`, in that order. Raises `ValueError` for an index outside
        0 .. T - 1.
        """
        for i in indices:
            if not 0 <= i < len(self._keys):
                raise ValueError(
                    f"index {int(i)} in indices={list(indices)} is out of range: pass indices from 0 to "
                    f"{len(self._keys) - 1}, one per key that you want"
                )
        begins = [max(0, begin) for begin in self.offset_per_key()]  # invalid negative offsets would count from the end
        lengths = self.lengths().view(len(self._keys), self._stride)[list(indices)]

        def gather(flat: torch.Tensor) -> torch.Tensor:
            return torch.cat([flat[:0], *(flat[begins[i] : begins[i + 1]] for i in indices)])

        return KeyedJaggedTensor(
            [self._keys[i] for i in indices],
            gather(self._values),
            None if self._weights is None else gather(self._weights),
            lengths=lengths.flatten(),
            stride=self._stride,
        )

    def __getitem__(self, key: str) -> JaggedTensor:
        index = _index_of(self._keys, key)
        begin, end = self.offset_per_key()[index : index + 2]
        offsets = self.offsets()[index * self._stride : (index + 1) * self._stride + 1]
        weights = None if self._weights is None else self._weights[begin:end]
        return JaggedTensor(self._values[begin:end], offsets - begin, weights)

    def to_dict(self) -> dict[str, JaggedTensor]:
        return {key: self[key] for key in self._keys}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Return the same features with every tensor on `device`."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        values = self._values.to(device, non_blocking=non_blocking)
        weights, lengths, offsets = moved(self._weights), moved(self._given_lengths), moved(self._given_offsets)
        there = KeyedJaggedTensor(self._keys, values, weights, lengths, offsets, self._stride)
        there._offset_per_key = self._offset_per_key
        return there

    def device(self) -> torch.device:
        return self._values.device

    def __repr__(self) -> str:
        weighted = "" if self._weights is None else ", weighted"
        return (
            f"KeyedJaggedTensor({counted(len(self._keys), 'key')} x {counted(self._stride, 'sample')}, "
            f"{counted(self._values.numel(), 'id')} of {self._values.dtype} on {self._values.device}{weighted}, "
            f"keys={self._keys})"
        )


class KeyedTensor:
    """Dense columns by name. `values` is [B, sum(length_per_key)]; the columns of key t begin at `offset_per_key()[t]`.

    `[key]` and `to_dict` return views. Raises `ValueError` for duplicate keys, for negative lengths, and if the lengths
    do not sum to the number of columns. `[key]` raises `KeyError`.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor) -> None:
        self._keys, self._length_per_key = _names(keys), list(checked_shape("length_per_key", length_per_key))
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"values is {kind(values)}: pass a tensor [B, columns of all keys]")
        columns = values.shape[-1] if values.dim() else -1
        if len(self._keys) != len(self._length_per_key) or columns != sum(self._length_per_key):
            raise ValueError(
                f"{counted(len(self._keys), 'key')} with {counted(len(self._length_per_key), 'length')} summing to "
                f"{sum(self._length_per_key)} do not match values of shape {tuple(values.shape)}: pass one length per "
                "key, with a sum equal to the number of columns"
            )
        self._values = values
        for key, length in zip(self._keys, self._length_per_key, strict=True):
            if length < 0:
                raise ValueError(f"key {key!r} has length {length}: pass the number of its columns, at least 0")

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the first column of each key, followed by the number of columns: T + 1 numbers."""
        return list(accumulate(self._length_per_key, initial=0))

    def key_dim(self) -> int:
        """Return the dimension along which keys are concatenated: always 1, as by default in TorchRec."""
        return 1

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the columns of `key`, [B, length of `key`], as a view."""
        index = _index_of(self._keys, key)
        return self._values.narrow(-1, sum(self._length_per_key[:index]), self._length_per_key[index])

    def to_dict(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._keys, self._values.split(self._length_per_key, dim=-1), strict=True))

    def __repr__(self) -> str:
        columns = ", ".join(f"{key}: {length}" for key, length in zip(self._keys, self._length_per_key, strict=True))
        return f"KeyedTensor({list(self._values.shape)} of {self._values.dtype}, columns {{{columns}}})"


def keyed_of(keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor) -> KeyedTensor:
    """Return a KeyedTensor without checks of its arguments, which have been checked for another tensor of columns."""
    made = KeyedTensor.__new__(KeyedTensor)
    made._keys, made._length_per_key, made._values = list(keys), list(length_per_key), values
    return made


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return int64 offsets [n + 1] for lengths [n]."""
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths.flatten(), 0, out=offsets[1:])
    return offsets


def as_jagged(features: Any) -> JaggedInput:
    """Convert a KeyedJaggedTensor (weft's or TorchRec's), or `(values, offsets[, per_sample_weights])`, to a
    `JaggedInput`.

    Raises `ValueError` for a TorchRec container with a variable stride per key or with inverse indices, and `TypeError`
    for any other object.
    """
    if isinstance(features, JaggedInput):
        return features
    if isinstance(features, tuple | list):
        if len(features) not in (2, 3):
            raise ValueError(
                f"features is a tuple of {len(features)} entries: pass (values, offsets[, per_sample_weights])"
            )
        values, offsets = features[:2]
        return JaggedInput(None, values, offsets, features[2] if len(features) == 3 else None)
    check_keyed(features)
    # Read this before `offsets()`, which makes offsets from lengths. Without this method, assume that the container got
    # both.
    from_lengths = hasattr(features, "offsets_or_none") and features.offsets_or_none() is None
    return JaggedInput(
        tuple(features.keys()),
        features.values(),
        features.offsets(),
        features.weights_or_none(),
        features.stride(),
        from_lengths,
    )


def check_keyed(features: Any) -> None:
    """Raise an error unless `features` is a KeyedJaggedTensor with one batch size for all keys, and valid lengths or
    offsets.

    On CPU, also raise an error if both are given and describe different bags.
    """
    if type(features) is KeyedJaggedTensor:
        lengths = given_lengths = features.lengths_or_none()
        given_offsets = features.offsets_or_none()
    else:
        _check_container(features)
        given_lengths, given_offsets = _answer(features, "lengths_or_none"), _answer(features, "offsets_or_none")
        # Use lengths if the container cannot tell whether it was made from lengths or from offsets.
        lengths = given_lengths if hasattr(features, "lengths_or_none") else features.lengths()
    if lengths is not None:
        _check_lengths(lengths, len(features.keys()), features.stride())
    if given_offsets is not None:
        check_tensor("offsets", given_offsets)
    if given_lengths is not None and given_offsets is not None:
        _check_bags(given_lengths, given_offsets)


def _check_container(features: Any) -> None:
    """Raise `TypeError` if a container of another class lacks a method, and `ValueError` if it uses an unsupported
    feature.
    """
    wanted = ("keys", "values", "lengths", "offsets", "weights_or_none", "stride")
    if missing := [name for name in wanted if not hasattr(features, name)]:
        raise TypeError(
            f"features is {kind(features)}, which has no {', '.join(f'{name}()' for name in missing)}: pass a "
            "KeyedJaggedTensor (weft's or TorchRec's)"
        )
    if _answer(features, "variable_stride_per_key"):
        raise ValueError("features has a variable stride per key: give every key the same batch (one bag per sample)")
    if _answer(features, "inverse_indices_or_none") is not None:
        raise ValueError("features has inverse indices: expand the batch first, each sample with its own bags")


def wrong_range(begin: int, end: int, count: int, from_lengths: bool) -> str:
    """Return the error text for bags that hold the values from `begin` to `end`, and not all `count` values.

    Such bags are refused, because offsets of another batch would otherwise ignore ids silently.

    from_lengths: True if the caller passed lengths and no offsets.
    """
    values = counted(count, "value")
    if from_lengths:
        return f"lengths sum to {end} but there are {values}: the bags must hold all values, so correct the lengths"
    fix = "correct the offsets"
    if 0 <= begin <= end <= count:
        fix += f", or pass values[{begin}:{end}] and offsets - {begin}"
    elif end - begin == count:
        fix += f", or pass offsets - {begin}"
    return (
        f"offsets go from {begin} to {end} but there are {values}: offsets are positions in values, 0 or more, and the bags must "
        f"hold all values, so {fix}"
    )


def _check_lengths(lengths: Any, keys: int, batch: int) -> None:
    """Raise `ValueError` unless lengths are integers, one for each bag."""
    check_tensor("lengths", lengths)
    if lengths.dtype not in INDEX_DTYPES:
        raise ValueError(f"lengths is {lengths.dtype}: pass {' or '.join(map(str, INDEX_DTYPES))}")
    if lengths.numel() != keys * batch:
        raise ValueError(
            f"{counted(lengths.numel(), 'length')} for {counted(keys, 'key')} x {counted(batch, 'sample')}: pass one length per bag"
        )


def _check_bags(lengths: Any, offsets: Any) -> None:
    """Raise `ValueError` if lengths and offsets are on CPU and describe different bags."""
    if torch.compiler.is_compiling():  # traced tensors have no values to compare
        return
    for given in (lengths, offsets):
        if not isinstance(given, torch.Tensor) or given.device.type != "cpu":
            return
    by_lengths, by_offsets = lengths.flatten(), offsets.flatten().diff()
    if by_lengths.shape == by_offsets.shape and (by_lengths != by_offsets).any():
        bag = int((by_lengths != by_offsets).nonzero()[0])
        raise ValueError(
            f"lengths and offsets disagree: bag {bag} has {counted(int(by_lengths[bag]), 'id')} by lengths, but "
            f"{int(by_offsets[bag])} by offsets: pass only one of them"
        )


def _answer(features: Any, method: str) -> Any:
    ask = getattr(features, method, None)
    return None if ask is None else ask()


def _names(keys: Sequence[str]) -> list[str]:
    """Return the keys as a list. Raise an error unless all keys are strings, and all are different."""
    names = list(iterated("keys", keys, "pass a list with the names of the features"))
    for key in names:
        if not isinstance(key, str):
            raise TypeError(f"key {key!r} in keys={names} is {kind(key)}: pass the name of a feature, a string")
    if len(set(names)) != len(names):
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"key {twice!r} appears more than once in keys={names}: name each feature once")
    return names


def _index_of(keys: Sequence[str], key: str) -> int:
    try:
        return keys.index(key)
    except ValueError:
        raise KeyError(f"{key!r} is not among the keys {list(keys)}") from None
