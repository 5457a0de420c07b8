"""What torch knows of the machine, for the run's header."""

import os
from typing import Any

import torch
import torch.distributed as dist

from distbench.worker.place import Place
from distbench.worker.scheduling import policy_name


def torch_facts(place: Place) -> dict[str, Any]:
    """torch, CUDA and NCCL versions, devices, backend, ranks and threads."""
    cuda = place.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()) if cuda else None,
        "device": place.device.type,
        "device_name": torch.cuda.get_device_name(place.device) if cuda else None,
        "num_devices": torch.cuda.device_count() if cuda else 0,
        "backend": place.backend,
        "world_size": dist.get_world_size(),
        "num_hosts": len(set(place.gather(os.uname().nodename))),
        "num_threads": torch.get_num_threads(),
        "scheduler": policy_name(),
    }
