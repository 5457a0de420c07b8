"""What a forward pass gives: the model's output as one tensor, and the cache that it works on."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from distbench.spec import Scenario, UserError
from distbench.worker.models.trees import kind_of, tensors_of
from distbench.worker.rank.failure import place_of

LOGITS = "logits"  # as models of transformers call them


def cache_of(scenario: Scenario, model: Any, batch: Any) -> Any:
    """The cache that the scenario makes for a model and a part of the batch; None where it has none."""
    return None if scenario.make_cache is None else scenario.make_cache(model, batch)


def output_of(scenario: Scenario, model: Any, batch: Any, cache: Any = None) -> torch.Tensor:
    """The output of a forward pass, when it is there: a collective that it still waits for is part of the pass.

    The scenario's `call` runs it where there is one; else a dict or a tuple goes to the model as its arguments.

    Raises:
        UserError: there is no tensor in what comes out.
    """
    if scenario.make_cache is not None:
        assert scenario.call is not None
        found = scenario.call(model, batch, cache)
    elif scenario.call is not None:
        found = scenario.call(model, batch)
    elif isinstance(batch, Mapping):
        found = model(**batch)
    elif isinstance(batch, list | tuple):
        found = model(*batch)
    else:
        found = model(batch)
    given = found.get(LOGITS) if isinstance(found, Mapping) else getattr(found, LOGITS, None)
    tensor = next((one for _, one in tensors_of(found if given is None else given)), None)
    if tensor is None:
        who = f"call ({place_of(scenario.call)})" if scenario.call else f"the model ({type(model).__name__})"
        raise UserError(f"{who} returns {kind_of(found)}, with inference=True it must return logits, a tensor")
    return _there(tensor)


def _there(tensor: Any) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if hasattr(local, "wait"):  # one that a functional collective has yet to fill
        local = local.wait()
    return tensor if hasattr(tensor, "to_local") else local


def tensors_in(found: Any) -> list[torch.Tensor]:
    """The tensors of a cache, whatever it is made of: containers, modules, objects with attributes; each once."""
    seen: set[int] = set()
    return list(_tensors_in(found, seen))


def _tensors_in(found: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        for one in found.values():
            yield from _tensors_in(one, seen)
    elif isinstance(found, list | tuple | set):
        for one in found:
            yield from _tensors_in(one, seen)
    elif hasattr(found, "__dict__") and not isinstance(found, type):
        yield from _tensors_in(vars(found), seen)
