"""Everything that touches torch. One process here is one rank."""

import torch
import torch.distributed as dist

from distbench.spec.versions import INSTALL

if not dist.is_available():
    raise ImportError(f"torch {torch.__version__} was built without distributed support; {INSTALL}")
