"""The sharded state of a model and its optimizer: copied out, put back, and whether both are exact."""

from typing import Any

import torch
from torch import nn

State = tuple[dict[str, Any], dict[str, Any]]


def saved_state(model: nn.Module, optimizer: Any) -> State:
    """Copies, in host memory, of what this rank holds of the parameters, buffers and the optimizer's state."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    found = get_state_dict(model, _listed(optimizer))
    return _copied(found[0]), _copied(found[1])


def load_state(model: nn.Module, optimizer: Any, state: State) -> None:
    """Put a saved state back, this rank's part of it."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    of_model, of_optimizer = state
    set_state_dict(model, _listed(optimizer), model_state_dict=of_model, optim_state_dict=of_optimizer)


def state_bytes(state: State) -> int:
    """Bytes that this rank's part of a state takes."""
    return sum(local.numel() * local.element_size() for local in map(_local, _tensors(state)))


def round_trip(model: nn.Module, optimizer: Any) -> tuple[int, str | None]:
    """Save, spoil every parameter, load: the state's bytes, and what is not as it was, None where all is."""
    state = saved_state(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            _local(parameter).fill_(torch.nan)
    load_state(model, optimizer, state)
    again = saved_state(model, optimizer)
    pairs = zip(_tensors(state), _tensors(again), strict=True)
    wrong = sum(not torch.equal(_local(one), _local(other)) for one, other in pairs)
    return state_bytes(state), f"{wrong} tensors of the state are not what was saved" if wrong else None


def _listed(optimizer: Any) -> Any:
    return () if optimizer is None else optimizer


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return [tensor for part in parts for tensor in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def _local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
