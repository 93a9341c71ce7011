"""The optimizer and the options of tables, from TorchRec's `fused_params`.

Values set by `apply_optimizer_in_backward` on a parameter, or given in the parameter's plan, take precedence over the
`fused_params` of the sharder. Names and defaults are as in FBGEMM's table-batched embeddings. An option that weft does
not support raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from weft.embedding import SGD, Adagrad, Adam, EmbeddingOptimizer, PartialRowwiseAdam, RowwiseAdagrad
from weft.embedding.options import BoundsCheck
from weft.embedding.tables import DTYPES

_RULES: dict[EmbOptimType, type[EmbeddingOptimizer]] = {
    EmbOptimType.SGD: SGD,
    EmbOptimType.EXACT_SGD: SGD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowwiseAdagrad,
    EmbOptimType.ROWWISE_ADAGRAD: RowwiseAdagrad,
    EmbOptimType.EXACT_ADAGRAD: Adagrad,
    EmbOptimType.ADAM: Adam,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: PartialRowwiseAdam,
}
_LEARNING_RATE = 0.01  # FBGEMM's default
_READ = {
    "optimizer", "learning_rate", "lr", "eps", "beta1", "beta2", "betas", "weight_decay", "weight_decay_mode", "output_dtype",
    "weights_precision", "bounds_check_mode",
}  # fmt: skip
_OFF = {"stochastic_rounding": False, "gradient_clipping": False, "max_norm": 0.0, "momentum": 0.0, "amsgrad": False}
"""Options that weft does not support, with the values that disable them."""
_OF_CACHES = {
    "cache_algorithm", "cache_load_factor", "cache_reserved_memory", "cache_precision", "cache_sets", "enforce_hbm",
    "prefetch_pipeline", "multipass_prefetch_config", "record_cache_metrics", "gather_uvm_cache_stats", "stats_reporter_config",
    "use_one_tbe_per_table", "_batch_key", "max_gradient",
}  # fmt: skip
"""Options that are ignored, because they have no effect on tables in device memory, or only together with another
option.
"""
_BOUNDS: dict[str, BoundsCheck] = {"FATAL": "fatal", "WARNING": "warning", "IGNORE": "ignore", "NONE": "none"}


@dataclass(frozen=True)
class TableOptions:
    """The options of a table that TorchRec's `fused_params` give. output_dtype: the dtype of pooled vectors."""

    optimizer: EmbeddingOptimizer
    output_dtype: torch.dtype
    bounds_check: BoundsCheck


def options_of(table: str, dtype: torch.dtype, fused_params: Mapping[str, Any]) -> TableOptions:
    """Return the options of a table with the name `table`, given TorchRec's `fused_params`. Raise
    `ValueError` for an option that weft does not support.

    dtype: the table's dtype.
    """
    at = f"table {table!r}"
    for name, value in fused_params.items():
        if name in _OFF:
            if value != _OFF[name] and not (name == "stochastic_rounding" and dtype == torch.float32):
                raise ValueError(f"{at}: {name}={value!r} is not supported: pass {_OFF[name]!r} or do not set it")
        elif name not in _READ | _OF_CACHES:
            raise ValueError(f"{at}: option {name}={value!r} of FBGEMM is not supported: do not set it")
    precision = _dtype(at, fused_params.get("weights_precision"), dtype)
    if precision != dtype:
        raise ValueError(f"{at}: weights_precision={precision}, but the table is {dtype}: set the table's data_type")
    mode = fused_params.get("bounds_check_mode")
    bounds = "WARNING" if mode is None else str(getattr(mode, "name", mode)).upper()
    if bounds not in _BOUNDS:
        raise ValueError(f"{at}: bounds_check_mode={mode!r} must be one of {', '.join(_BOUNDS)}")
    output = _dtype(at, fused_params.get("output_dtype"), torch.float32)
    return TableOptions(_optimizer(at, fused_params), output, _BOUNDS[bounds])


def _optimizer(at: str, given: Mapping[str, Any]) -> EmbeddingOptimizer:
    kind = given.get("optimizer", EmbOptimType.EXACT_SGD)
    rule = _RULES.get(kind) if isinstance(kind, EmbOptimType) else None
    if rule is None:
        known = ", ".join(one.name for one in _RULES)
        raise ValueError(
            f"{at}: optimizer {getattr(kind, 'name', kind)} is not supported: pass a member of EmbOptimType, one of {known}"
        )
    rate = "learning_rate" if "learning_rate" in given else "lr"
    numbers: dict[str, Any] = {"lr": _number(at, rate, given.get(rate, _LEARNING_RATE))}
    fields = rule.__dataclass_fields__
    betas = given.get("betas", (None, None))
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"{at}: betas={betas!r} must be two numbers: pass (beta1, beta2)")
    for name, value in zip(("eps", "beta1", "beta2"), (None, *betas), strict=True):
        value = given.get(name, value)
        if value is not None and name in fields:
            numbers[name] = _number(at, name, value)
    decay = _number(at, "weight_decay", given.get("weight_decay") or 0.0)
    if decay:
        mode = given.get("weight_decay_mode")
        if rule is not RowwiseAdagrad or getattr(mode, "name", mode) != "L2":
            raise ValueError(
                f"{at}: weight_decay={decay} of {rule.__name__} with "
                f"weight_decay_mode={getattr(mode, 'name', mode)} is not supported: weft supports weight decay "
                "only for rowwise Adagrad with WeightDecayMode.L2. Pass 0"
            )
        numbers["weight_decay"] = decay
    return rule(**numbers)


def _number(at: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for a tensor with several elements
        raise ValueError(f"{at}: {name}={value!r} is not a number: pass a float") from None


def _dtype(at: str, given: Any, default: torch.dtype) -> torch.dtype:
    """Return `given`, or `default` if it is None, as a torch dtype.

    given: a torch dtype, or a value of FBGEMM's or TorchRec's enumeration of dtypes. at: a description of the table,
    for error texts.
    """
    if given is None:
        return default
    if isinstance(given, torch.dtype):
        found: Any = given
    else:
        found = given.as_dtype() if hasattr(given, "as_dtype") else None
    if found not in DTYPES:
        raise ValueError(f"{at}: dtype {given} is not supported: use one of {', '.join(map(str, DTYPES))}")
    return found  # type: ignore[no-any-return]
