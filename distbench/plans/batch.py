"""The global batch of a scenario, in any container: which of its tensors are split, and the part of one rank."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distbench.plans.model import kind_of, leaves_of, mapped, name_of, tensors_of
from distbench.ranks.failure import blamed, place_of
from distbench.redistribute.expected_shards import chunk_of
from distbench.spec import CpPlan, Scenario, UserError

# The tensor dim that is split: one number for all tensors, or a map from glob pattern over the name to a tensor dim
# (None: not split).
Dims = int | Mapping[str, int | None]


@dataclass(frozen=True)
class Batch:
    """A batch: tensors in dicts, lists, tuples and dataclasses, nested in any way; other values are unchanged."""

    tree: Any  # what `make_batch` returned
    # Batch dims that the scenario declares; None to derive them from the first tensor
    dims: Dims | None = None
    sequence_dims: Dims | None = None  # the same for sequence dims
    place: str = ""  # `file:line` of the function that made the batch, for messages

    @property
    def origin(self) -> str:
        """The function that made the batch, with its place, for messages."""
        return f"make_batch ({self.place})" if self.place else "make_batch"

    @property
    def first(self) -> torch.Tensor:
        """The first tensor with a tensor dim; raises UserError if all tensors are scalars."""
        first_tensor = next((tensor for _, tensor in tensors_of(self.tree) if tensor.ndim), None)
        if first_tensor is None:
            raise UserError(
                f"{self.origin} returns {kind_of(self.tree)} without a tensor that can be split over ranks; return "
                "tensors of the global batch, batch first, in a dict, list, tuple or dataclass"
            )
        return first_tensor

    @property
    def length(self) -> int:
        """Number of samples: the length of the first tensor that is split."""
        name, tensor_dim = next(iter(self.split_dims.items()))
        return dict(tensors_of(self.tree))[name].shape[tensor_dim]

    @property
    def split_dims(self) -> dict[str, int]:
        """Map the name of each tensor that is split over data parallel ranks to the tensor dim that is split.

        The default is tensor dim 0 of every tensor with the first tensor's length. Other tensors, such as a mask
        of sequence x sequence, are whole on every rank.

        Raises:
            UserError: nothing is split, or batch_dims match no tensor.
        """
        if self.dims is not None:
            return self._declared(self.dims, "batch_dims")
        length = self.first.shape[0]
        return {name: 0 for name, tensor in tensors_of(self.tree) if tensor.ndim and tensor.shape[0] == length}

    def guessed(self) -> str:
        """Return a note on split and unsplit tensors, if the scenario declares no batch dims and tensors differ."""
        if self.dims is not None:
            return ""
        if isinstance(self.tree, list) and all(isinstance(item, Mapping | list | tuple) and item for item in self.tree):
            return "; a list of samples is split within each sample, so stack the samples, batch first"
        split = self.split_dims
        unsplit = [name for name, tensor in tensors_of(self.tree) if tensor.ndim and name not in split]
        if not unsplit:
            return ""
        guess = f"{_listed(split)} split over data parallel ranks and {_listed(unsplit)} not"
        return f"; of the batch {guess} (change this with batch_dims)"

    def sequence_dims_of(self, plan: CpPlan) -> dict[str, int]:
        """Map tensor names to the sequence dim: `seq_dim` of tensors whose length there equals the first tensor's."""
        if self.sequence_dims is not None:
            return self._declared(self.sequence_dims, "sequence_dims")
        at = plan.seq_dim
        lengths = {name: tensor.shape[at] for name, tensor in tensors_of(self.tree) if tensor.ndim > at}
        first = next(iter(lengths.values()), None)
        return {name: at for name, length in lengths.items() if length == first}

    def _declared(self, dims: Dims, option: str) -> dict[str, int]:
        tensors = dict(tensors_of(self.tree))
        with_dims = [name for name, tensor in tensors.items() if tensor.ndim]
        split_dims: dict[str, int] = {}
        for pattern, tensor_dim in (dims if isinstance(dims, Mapping) else dict.fromkeys(with_dims, dims)).items():
            matched = [pattern] if pattern in tensors else fnmatch.filter(tensors, pattern)
            if not matched:
                raise UserError(f"{option} has {pattern!r}, but the batch has {', '.join(tensors) or 'no tensors'}")
            if tensor_dim is None:
                continue
            for name in matched:
                shape = list(tensors[name].shape)
                if not -len(shape) <= tensor_dim < len(shape):
                    raise UserError(f"{option} splits {name} on tensor dim {tensor_dim}, but its shape is {shape}")
                split_dims[name] = tensor_dim % len(shape)
        if not split_dims:
            raise UserError(f"{option}={dims!r} splits no tensor of the batch; map tensor names to tensor dims")
        return split_dims

    def part(self, index: int, count: int, device: torch.device) -> Any:
        """Return part `index` of `count` equal parts, on a device."""
        dims = self.split_dims

        def own(name: str, tensor: torch.Tensor) -> torch.Tensor:
            cut = chunk_of(tensor, dims[name], count, index) if name in dims else tensor
            on_device = cut.to(device)
            return on_device.contiguous() if on_device.layout == torch.strided else on_device

        return mapped(self.tree, own)


def batch_of(scenario: Scenario) -> Batch:
    """Make the scenario's global batch.

    Raises:
        UserError: make_batch raises, or its batch has nothing to split.
    """
    assert scenario.make_batch is not None
    with blamed("make_batch", scenario.make_batch):
        tree = scenario.make_batch()
    # Gradients must not reach the first step's backward through the code that made the batch.
    tree = mapped(tree, lambda _, value: value if value.grad_fn is None else value.detach().requires_grad_())
    batch = Batch(tree, scenario.batch_dims, scenario.sequence_dims, place_of(scenario.make_batch))
    # numpy scalars are treated as numbers.
    arrays = (
        name for name, leaf in leaves_of(tree) if type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", 0) > 0
    )
    if array := next(arrays, None):
        raise UserError(f"{batch.origin} returns {array} as a numpy array; return tensors by torch.from_numpy(...)")
    if meta := next((name for name, tensor in tensors_of(tree) if tensor.is_meta), None):
        raise UserError(f"{batch.origin} returns {meta} on the meta device; return values on the CPU")
    tensors = dict(tensors_of(tree))
    if odd := next((name for name in batch.split_dims if tensors[name].layout != torch.strided), None):
        kind = str(tensors[odd].layout).removeprefix("torch.")
        raise UserError(
            f"{batch.origin} returns {odd} as a {kind} tensor, which cannot be split over ranks; return a dense "
            "tensor and convert it in call=, or leave the tensor unsplit with batch_dims"
        )
    if not batch.length:
        raise UserError(f"{batch.origin} returns an empty batch; return at least one sample per data parallel rank")
    return batch


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return f"{', '.join(listed)} {'are' if len(listed) > 1 else 'is'}"


def forward(model: Any, inputs: Any) -> Any:
    """Call the model with a dict as keyword arguments, with a list or tuple as arguments, or with any other value as
    the only argument.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def loss_of(scenario: Scenario, model: Any, batch: Any, keep: Callable[[Any], None] = lambda _: None) -> torch.Tensor:
    """Run forward and loss on a batch or a part of a batch. If distbench calls the model, `keep` receives the output.

    The scenario's `call`, if given, runs forward and loss. Otherwise a dict or a tuple is passed to the model as its
    arguments; with a `loss`, a pair is inputs and targets. Without a `loss`, the model returns the loss: a scalar, the
    `loss` of its output, or the first item of a tuple or list.

    Raises:
        UserError: the result is not a scalar.
    """
    if scenario.call is not None:
        return _scalar(scenario.call(model, batch), f"call ({place_of(scenario.call)})")
    is_pair = scenario.loss is not None and isinstance(batch, list | tuple) and len(batch) == 2
    inputs, targets = batch if is_pair else (batch, batch)
    output = forward(model, inputs)
    keep(output)
    if scenario.loss is not None:
        return _scalar(scenario.loss(output, targets), f"loss ({place_of(scenario.loss)})")
    who = f"without a loss, the model ({name_of(model)})"
    advice = "; give loss=(output, targets) -> scalar or call=(model, batch) -> scalar"
    value = output
    while not hasattr(value, "loss") and isinstance(value, tuple | list) and value:
        value = value[0]
    if isinstance(value, Mapping):
        if value.get("loss") is None:
            detail = "loss is None" if "loss" in value else f"keys are {', '.join(map(str, value))}"
            raise UserError(f"{who} returns {kind_of(value)} whose {detail}{advice}")
        return _scalar(value["loss"], who, advice)
    return _scalar(getattr(value, "loss", value), who, advice)


def _scalar(loss: Any, who: str, advice: str = "") -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss if loss.ndim == 0 else loss.reshape(())
    returned = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else kind_of(loss)
    raise UserError(f"{who} returns {returned} instead of the loss, one number{advice}")
