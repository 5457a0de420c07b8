"""What torch refuses when a plan is applied, as one sentence with the plan's field and the module."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from distbench.plans.batch import name_of
from distbench.ranks.failure import one_line
from distbench.spec import UserError
from distbench.torch_private import Unsupported


@contextlib.contextmanager
def named_refusal(field: str, name: str = "", module: nn.Module | None = None) -> Iterator[None]:
    """Name the field and the module in what torch raises inside, which rarely names either.

    Args:
        field: what of the plan is applied.
        name: the module's, empty for the root.
        module: what the field is applied to, if it is applied to one module.

    Raises:
        UserError: torch raised anything but a failure of communication.
    """
    try:
        yield
    except (UserError, Unsupported, dist.DistError):
        raise
    except Exception as error:
        module_text = f"{name or 'the root'}, a {name_of(module)}" if module is not None else "this"
        why = one_line(error).rstrip(".")
        raise UserError(f"{field}: torch refuses {module_text} ({why}); change the plan there") from error
