"""torchtitan's debug Llama, divided by torchtitan's code with torch's styles or with weft's. These functions run on the
ranks, and need torchtitan 0.2.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.on_ranks import device
from support.style_ranks import STYLES, counted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

NAMES = ("ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel")


def missing() -> str:
    """Return the reason why these tests cannot run; "" if they can."""
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return "needs torchtitan: pip install torchtitan==0.2.1"
    return "" if version.startswith("0.2.") else f"torchtitan {version} does not divide models by styles: needs 0.2"


def train(
    group: dist.ProcessGroup, by: str, checkpointing: str, data_parallel: int, steps: int
) -> tuple[list[float], dict[str, int]]:
    """Train. Return (losses, number of calls of weft in the last forward). checkpointing: "none", "full", or "op" to
    save the results of some operators.
    """
    import torchtitan.models.llama3 as llama
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra import parallelize

    native = {name: getattr(parallelize, name) for name in NAMES}
    for name in NAMES:  # the same as changing torchtitan's imports
        setattr(parallelize, name, getattr(STYLES[by], name))
    mesh = init_device_mesh(device().type, (data_parallel, group.size() // data_parallel), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    arguments = llama.llama3_args["debugmodel"]
    arguments.n_layers, arguments.vocab_size, arguments.max_seq_len, length = 2, 128, 64, 32
    model = llama.Transformer(arguments).to(device())
    model.init_weights(buffer_device=device())
    wanted = {"loss_parallel": True, "enable_float8_tensorwise_tp": False, "cp_enabled": False}
    known = inspect.signature(parallelize.apply_tp).parameters
    parallelize.apply_tp(model, mesh["tp"], **{name: value for name, value in wanted.items() if name in known})
    for name in NAMES:
        setattr(parallelize, name, native[name])
    if checkpointing != "none":
        mode, saved = "full" if checkpointing == "full" else "selective", set(parallelize._op_sac_save_list)
        saved.add(torch.ops.weft.matmul_reduce_scatter.default if by == "weft" else torch.ops.aten.mm.default)
        apply_ac(model, ActivationCheckpoint(mode=mode, selective_ac_option="op"), op_sac_save_list=saved)  # type: ignore[arg-type]
    if data_parallel > 1:
        parallelize.apply_fsdp(model, mesh["dp"], torch.float32, torch.float32, pp_enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses: list[float] = []
    calls: Counter[str] = Counter()
    for step in range(steps):
        random = torch.Generator().manual_seed(100 * step + mesh["dp"].get_local_rank())
        first = torch.randint(128, (2, 1), generator=random)
        text = ((first + torch.arange(length + 1) ** 2) % 128).to(device())
        with loss_parallel():
            with counted() as calls:
                logits: Any = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = loss.detach()
        losses.append(float(found.full_tensor() if isinstance(found, DTensor) else found))
    return losses, dict(calls)
