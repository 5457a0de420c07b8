"""What torch knows of the machine, for the run's header."""

import os
from typing import Any

import torch
import torch.distributed as dist

from distbench.worker.rank.rank_context import RankContext
from distbench.worker.rank.scheduling import policy_name


def torch_facts(context: RankContext) -> dict[str, Any]:
    """torch, CUDA and NCCL versions, devices, backend, ranks and threads."""
    cuda = context.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()) if cuda else None,
        "device": context.device.type,
        "device_name": torch.cuda.get_device_name(context.device) if cuda else None,
        "num_devices": torch.cuda.device_count() if cuda else 0,
        "backend": context.backend,
        "world_size": dist.get_world_size(),
        "num_hosts": len(set(context.gather(os.uname().nodename))),
        "num_threads": torch.get_num_threads(),
        "scheduler": policy_name(),
    }
