"""The `Work` of training steps: modules whose backward updates embedding tables. `training_tables` has the modules.

A rank computes all tables and optimizer states again in float64, from the data of all ranks. It uses the formulas of
`weft.embedding.optimizers`, or the optimizer of torch that updates the tables. A step that a rank reports as successful
must leave this rank's tables as computed. A step that failed must leave them unchanged if a later step succeeds.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch._dynamo  # imported now, so that no interrupted call imports it
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import weft
from weft.embedding import ColumnWise, DataParallel, RowWise, hash_ids
from weft.embedding.partition import TablePart
from weft.nn import FusedOptimizers, LoadPlanner, ModelState, ShardedEmbeddingBagCollection

from .bad import Form
from .pooled import Collection, Features, GlobalBatch, LocalBatch, pooled
from .training_reference import DENSE, EPS, LR, RULES, SPARSE, TOLERANCES, Tables
from .work import Differentiable, Given, Results

# In steps 3, 10, 17, ... tables are saved. In steps 6, 13, 20, ... they are loaded again.
_SAVE, _LOAD, _EVERY = 3, 6, 7
_FAR = 100_000  # the distance between the numbers of a step's batches


class Training(Collection, Differentiable):
    """A training step: forward, and a backward that updates the tables.

    prefetch: "now" distributes the ids in a call of its own before forward. "ahead" does so one step before. "loop" takes
    the batches from `weft.nn.prefetched`. batches: the number of batches of a step, whose gradients make one update
    (`accumulate`). optimizer: None for gradients in `.grad`, which may be sparse. torchs: the name of the optimizer of
    torch that then updates the tables, or None.
    """

    devices, differentiable, local_batch, told_sizes = ("cpu",), True, True, False
    poison: tuple[int, int, float] | None = None
    """The rank and the step of an infinite or NaN gradient, and its value; None if there is none."""
    ahead: tuple[int, Given, Any] | None
    """A step whose batch has been prefetched: its number, its arguments and its features."""
    next: Tables  # the tables after the present step
    last = 10**6  # the number of steps for which this rank has batches
    arguments = ("values", "lengths", "offsets")
    fused: ClassVar[Given] = {"optimizer": "SGD", "nonfinite": "raise"}
    """Options with which every gradient is checked, and tables are updated."""
    tolerance = 1e-4
    bad_calls = LocalBatch.bad_calls

    @classmethod
    def bad_values(cls, options: Given) -> list[Form]:
        of = GlobalBatch if options.get("input") == "global_batch" else super()
        return of.bad_values(options)

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        rule, batches = rng.choice([None, None, None, *RULES, *RULES]), rng.choice([1, 1, 2])
        prefetch = rng.choice([None, None, "now", *(["ahead", "loop"] if batches == 1 else ["now"])])
        drawn = {
            **super().drawn(rng, device), "backward": True, "batches": batches, "prefetch": prefetch, "optimizer": rule,
            "gradients": rng.choice(["sum", "mean"]), "restores": rng.random() < 0.5, "max_ids": rng.choice([None, 10**6]),
        }  # fmt: skip
        if rule is None:
            sparse = rng.random() < 0.5
            return drawn | {"sparse": sparse, "torchs": rng.choice([None, None, *(SPARSE if sparse else DENSE)])}
        drawn["nonfinite"] = rng.choice(["propagate", "skip", "raise"])
        drawn |= rng.choice([{}, {}, {"dtype": "float16"}, {"dtype": "bfloat16"}])
        drawn |= {"rounding": "stochastic"} if "dtype" in drawn and rng.random() < 0.5 else {}
        drawn |= rng.choice([{}, {}, {"gradient_dtype": "bf16"}, {"gradient_dtype": "fp16"}])
        return drawn | rng.choice([{}, {"weight_decay": 0.125}, {"clip_norm": 20.0}, {"clip_value": 2.0}])

    @classmethod
    def other_makings(cls, world: int, options: Given) -> list[Given]:
        rules = [{"optimizer": rule} for rule in (None, *RULES) if rule != options["optimizer"]]
        others = [{"gradients": "sum" if options["gradients"] == "mean" else "mean"}]
        if options.get("input") != "global_batch":
            others.append({"max_ids": 10**5})
        if options["optimizer"] is None:
            others.append({"sparse": not options["sparse"]})
        return [*rules, *others, *cls._other_placements(world, options), *cls._other_settings(options)]

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        return [*cls._other_placements(world, options), *cls._other_settings(options)]

    @classmethod
    def _other_placements(cls, world: int, options: Given) -> list[Given]:
        return []

    @classmethod
    def _other_settings(cls, options: Given) -> list[Given]:
        other = {"bounds_check": "fatal" if options["bounds_check"] == "warning" else "warning"}
        return [other, {"hash": not options.get("hash", False)}]

    # --- the module and its tables ---

    def make(self) -> None:
        self.dims = self._dims()
        self.tables = [
            weft.EmbeddingBagConfig(self.ROWS, dim, f"t{i}", (f"f{i}",), self._pooling(i), self.dtype)
            for i, dim in enumerate(self.dims)
        ]
        self.weighted = self.options["is_weighted"]
        self.batches, self.skips, self.ahead = self.options["batches"], 0, None
        self.local_batch = self.options.get("input") != "global_batch"  # type: ignore[misc]
        if self.dtype in TOLERANCES:
            self.tolerance = TOLERANCES[self.dtype]["rounding" in self.options]
        self._saved: Any = None
        self._loop: Iterator[tuple[int, Given, Any]] | None = None
        self.module: Any = self._made(self.group, self._placement())
        self.module.load_full_weights({table.name: self._table(i) for i, table in enumerate(self.tables)})
        self.parts = self._parts()
        if not self.local_batch:
            self.sharding = self.module.sharding
        self.torchs = None
        if self.options["optimizer"] is None and self.options.get("torchs"):
            weights = [weight for _, weight in self.parts] or [torch.zeros(0, requires_grad=True)]
            self.torchs = (SPARSE if self.options["sparse"] else DENSE)[self.options["torchs"]](weights, lr=LR)
        blocks = [
            sorted({(p.column, p.column + p.columns) for p in self._all_parts() if p.table == i}) for i in range(4)
        ]
        whole = [of or [(0, dim)] for of, dim in zip(blocks, self.dims, strict=True)]
        rounds_to = self.dtype if self.dtype in TOLERANCES and "rounding" not in self.options else None
        self.model = Tables([self._table(i) for i in range(4)], whole, self.options, rounds_to)

    def _dims(self) -> tuple[int, ...]:
        return 4, 3, 8, 11 + self.other

    def _pooling(self, i: int) -> Any:
        return "mean" if i % 2 else "sum"

    def _made(self, group: Any, placement: list[Any]) -> Any:
        rule, optimizer = self.options["optimizer"], None
        if rule is not None:
            names = ("nonfinite", "weight_decay", "clip_norm", "clip_value", "rounding", "gradient_dtype")
            given = {name: self.options[name] for name in names if name in self.options}
            optimizer = RULES[rule](lr=LR, **given, **({} if rule == "SGD" else {"eps": EPS}))
        return self._module(
            tables=self.tables, group=group, placement=placement, device=self.device, optimizer=optimizer,
            gradients=self.options["gradients"], max_ids=self.options["max_ids"], deadline_s=self.options["deadline_s"],
            sparse=rule is None and self.options.get("sparse", False), **self._settings(),
        )  # fmt: skip

    def _placement(self) -> list[Any]:
        raise NotImplementedError

    def _module(self, **options: Any) -> Any:
        input = self.options.get("input", "local_batch")
        return ShardedEmbeddingBagCollection(is_weighted=self.weighted, input=input, **options)

    def _parts(self) -> list[tuple[TablePart, torch.Tensor]]:
        found: list[tuple[TablePart, torch.Tensor]] = self.module.parts()
        return found

    def _all_parts(self) -> list[TablePart]:
        found: list[TablePart] = self.module.partition.parts
        return found

    # --- calls ---

    def begin(self, n: int) -> None:
        """Set the learning rate of step n. In some steps, save the tables and states, or load those that were saved. Take
        the batch of the step from the loop, if there is one.
        """
        if self.options["prefetch"] == "loop":
            self._advance(n)
        if (optimizer := self.torchs or self._fused) is not None:
            optimizer.param_groups[0]["lr"] = self._lr(n)
        if not self.options["restores"] or self.options["optimizer"] is None:
            return
        if n % _EVERY == _SAVE:
            weights = {name: value.clone() for name, value in self.module.state_dict().items()}
            self._saved = weights, copy.deepcopy(self.module.fused_optimizer.state_dict()), self.model
        elif n % _EVERY == _LOAD and self._saved is not None:
            weights, states, self.model = self._saved
            self.module.load_state_dict(weights)
            self.module.fused_optimizer.load_state_dict(states)
            self.module.fused_optimizer.param_groups[0]["lr"] = self._lr(n)

    @property
    def _fused(self) -> Any:
        return None if self.options["optimizer"] is None else self.module.fused_optimizer

    def save(self, folder: str) -> Callable[[], tuple[Results, Results]] | None:
        """Save a checkpoint together with the other ranks. Return a function that loads it into a module of one rank, and
        returns (all tables and states in the module, their right values).
        """
        if self.options["optimizer"] is None:
            return None
        dcp.save(checkpoint_state(self.module), checkpoint_id=folder, process_group=self.group)
        return self._loads_alone(folder)

    def _loads_alone(self, folder: str) -> Callable[[], tuple[Results, Results]]:
        """Return a function that loads the present tables from `folder` into a module of one rank, as `save` does."""
        alone = copy.copy(self)
        alone.module, alone.group, alone.parts, alone.rank = None, None, [], 0  # type: ignore[assignment]
        alone.ahead = alone._loop = None  # they refer to the module
        return lambda: alone._loaded(folder, dist.group.WORLD)

    def _loaded(self, folder: str, group: Any) -> tuple[Results, Results]:
        self.module = self._made(group, [_alone(sharding) for sharding in self._placement()])
        dcp.load(checkpoint_state(self.module), checkpoint_id=folder, process_group=group, planner=LoadPlanner())
        self.parts = self._parts()
        return self._tables(), self._right(self.model)

    def _lr(self, n: int) -> float:
        return LR * (1 + n % 3)

    def _advance(self, n: int) -> None:
        """Take the batch of step n from a loop of prefetched batches, as a program does that catches errors in its loop."""
        if self._loop is None:
            self._loop = weft.nn.prefetched(self._batches_from(n), {self.module: lambda batch: batch[2]})
        for number, given, features in self._loop:
            if number == n:
                self.ahead = n, given, features
                return

    def _batches_from(self, n: int) -> Iterator[tuple[int, Given, Any]]:
        for number in range(n, self.last):
            given = Collection.inputs(self, number)
            yield number, given, self._features(given)

    def spoil_step(self) -> None:
        """Set a number of updates that differs from the other ranks'."""
        self.module.fused_optimizer.set_optimizer_step(1000)

    def freeze(self) -> None:
        """Stop to train the tables, unlike the other ranks."""
        self.module.requires_grad_(False)

    def spoil(self) -> None:
        """Set a learning rate that differs from the other ranks'."""
        self.module.fused_optimizer.param_groups[0]["lr"] = 7.0

    def inputs(self, n: int) -> Given:
        if self.ahead is not None and self.ahead[0] == n:
            return dict(self.ahead[1])
        return super().inputs(n)

    def prefetch(self, n: int, given: Given) -> None:
        self.ahead = n, given, self._features(given)
        self.module.prefetch(self.ahead[2])

    def _features(self, given: Given) -> Any:
        fields = {name: given[name] for name in ("keys", "values", "lengths", "offsets", "weights", "stride")}
        if self.ahead is not None and all(given[name] is value for name, value in self.ahead[1].items()):
            return self.ahead[2]
        return given.get("features", Features(**fields))

    def forward(self, given: Given) -> Results:
        features, self.ahead = self._features(given), None
        with torch.set_grad_enabled(self.backward):
            return self._results(self._called(features, given))

    def _called(self, features: Any, given: Given) -> Any:
        return self.module(features, batch_sizes=given["batch_sizes"])

    def _results(self, out: Any) -> Results:
        return [out.values()]

    def gradients(self, n: int, given: Given, results: Results, grads: Results) -> Results:
        """Run the backward of all batches of the step. Return this rank's tables and their states, or their gradients."""
        for _, weight in self.parts:
            weight.grad = None
        if results and not any(y.requires_grad for y in results):  # this rank has frozen its tables
            self.next = self.model
            return self._wanted
        several = self.batches > 1
        with self.module.accumulate() if several else contextlib.nullcontext():
            torch.autograd.backward(results, _as(results, grads), retain_graph=True)  # may run again after Ctrl-C
            for number in range(1, self.batches - self.skips):
                of_batch = n + number * _FAR
                more = self.forward(Collection.inputs(self, of_batch))
                torch.autograd.backward(more, _as(more, self._upstream(self.rank, of_batch)))
        if self.torchs is not None:
            self.torchs.step()
        elif self.options["optimizer"] is None:
            found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for _, weight in self.parts]
            return [grad.to_dense() for grad in found]
        return self._tables()

    def _tables(self) -> Results:
        """Return this rank's parts of tables, each followed by its optimizer states."""
        found = []
        for _, weight in self.parts:
            found += [weight.detach().clone(), *(state.clone() for state in self._states(weight).values())]
        return found

    def _states(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._fused is None:
            return {}
        found: dict[str, torch.Tensor] = self._fused.state.get(weight, {})
        return found

    def failed(self) -> None:
        """Discard what the failed step has prefetched, as a program must after an error."""
        self.ahead = None
        if self.options["prefetch"] not in (None, "loop"):
            self.module.cancel_prefetch()

    def succeeded(self) -> None:
        """Expect from now on the tables that this step was computed to leave."""
        self.model = self.next

    # --- right results ---

    def _rows(self, i: int, rank: int, n: int) -> torch.Tensor:
        ids = self._bags(i, rank, n)[0]
        return hash_ids(ids, self.ROWS) if self.options.get("hash") else ids

    def expected(self, n: int) -> Results:
        columns = []
        for i, table in enumerate(self.tables):
            _, lengths, weights = self._bags(i, self.rank, n)
            rows = self.model.weights[i][self._rows(i, self.rank, n)] * (weights[:, None] if self.weighted else 1)
            columns.append(pooled(rows, lengths, table.pooling))
        return [torch.cat(columns, dim=1)]

    def _weighing(self, rank: int, n: int) -> torch.Tensor:
        return self._poisoned(super()._weighing(rank, n), rank, n)

    def _poisoned(self, grad: torch.Tensor, rank: int, n: int) -> torch.Tensor:
        """Return `grad`, whose last element is infinite or NaN if `poison` says so."""
        if self.poison is not None and self.poison[:2] == (rank, n) and grad.numel():
            grad[-1, -1] = self.poison[2]
        return grad

    def _upstream(self, rank: int, n: int) -> Results:
        """Return the gradients of the results of `rank`."""
        return [self._weighing(rank, n)]

    def reaching(self, n: int) -> Results:
        """Return, for each result of step n, True for the elements whose gradients reach a row. Those of empty bags do not."""
        lengths = [self._bags(i, self.rank, n)[1] for i in range(len(self.dims))]
        return [torch.cat([(of > 0)[:, None].expand(-1, d) for of, d in zip(lengths, self.dims, strict=True)], 1)]

    def _of_ids(self, i: int, rank: int, n: int) -> torch.Tensor:
        """Return the gradient of the row of each id of table i."""
        begin = sum(self.dims[:i])
        _, lengths, weights = self._bags(i, rank, n)
        of_bags = self._weighing(rank, n)[:, begin : begin + self.dims[i]]
        if self.tables[i].pooling == "mean":
            of_bags = of_bags / lengths.clamp(min=1)[:, None]
        return of_bags.repeat_interleave(lengths, 0) * (weights[:, None] if self.weighted else 1)

    def grads(self, n: int) -> tuple[Results, Results]:
        of_tables, read = [], []
        for i, dim in enumerate(self.dims):
            total, rows = torch.zeros(self.ROWS, dim, dtype=torch.float64), torch.zeros(self.ROWS, dtype=torch.bool)
            for batch in range(self.batches):
                for rank in range(self.world):
                    at = self._rows(i, rank, n + batch * _FAR)
                    total.index_add_(0, at, self._of_ids(i, rank, n + batch * _FAR).double())
                    rows[at] = True
            of_tables.append(total / (self.world if self.options["gradients"] == "mean" else 1))
            read.append(rows)
        if self._updates:
            self.next = self.model.updated(of_tables, read, self._lr(n))
            self._wanted = self._right(self.next)
        else:
            self.next, self._wanted = self.model, [_part(of_tables[p.table], p) for p, _ in self.parts]
        return self._upstream(self.rank, n), self._wanted

    def _right(self, model: Tables) -> Results:
        """Return what `_tables` must return if all tables are as in `model`."""
        wanted = []
        for part, weight in self.parts:
            wanted.append(_part(model.weights[part.table], part))
            for state, of in zip(self._states(weight).values(), (model.first, model.second), strict=False):
                of_part = _part(of[part.table], part)
                wanted.append(of_part[:, 0] if state.dim() == 1 else of_part)
        return wanted

    @property
    def _updates(self) -> bool:
        """True if a step updates the tables, False if it leaves gradients."""
        return self.options["optimizer"] is not None or self.torchs is not None

    def wanted(self, given: Given) -> Results:
        raise NotImplementedError  # `gradients` needs no leaves


def _as(results: Results, grads: Results) -> Results:
    """Return the gradients in the dtypes of their results."""
    return [grad.to(y.dtype) for y, grad in zip(results, grads, strict=True)]


def checkpoint_state(module: nn.Module) -> dict[str, Any]:
    model = nn.ModuleDict({"tables": module})
    return {"model": ModelState(model), "optimizers": FusedOptimizers(model)}


def _alone(sharding: Any) -> Any:
    """Return the sharding of a table on one rank that can load the table and its optimizer states from `sharding`."""
    if isinstance(sharding, ColumnWise):
        return ColumnWise((0,) * len(sharding.ranks), sharding.columns)
    return RowWise((0,)) if isinstance(sharding, RowWise) else sharding if isinstance(sharding, DataParallel) else 0


def _part(whole: torch.Tensor, part: TablePart) -> torch.Tensor:
    return whole[part.row : part.row + part.rows, part.column : part.column + part.columns]
