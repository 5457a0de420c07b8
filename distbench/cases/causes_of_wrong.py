"""Why a step may come out otherwise than on one device: likely causes in its model, batch, loss or own functions.

Each function yields a sentence where its cause is likely, and nothing else.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distbench.plans.model import tensors_of

# The label that F.cross_entropy ignores by default.
IGNORED = -100
# Name of a parameter to which part of it a rank holds, and how large its gradient is.
Gradients = Mapping[str, tuple[tuple[int, ...], float]]
# torch has no public name for what these have in common.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Relative, to tell a sum over ranks from what is merely wrong.
CLOSE = 1e-3
# A gradient that never came is off by its own size.
LOST = 0.99


def of_random(module: str | None, in_eval_mode: str | None) -> Iterator[str]:
    """Which module draws random numbers in train mode, if any, and what draws them in eval mode too."""
    if module is not None and in_eval_mode is None:
        yield (
            f"{module} draws random numbers, other ones on each rank; return model.eval() from build_model, or drop "
            "with p=0"
        )
    elif in_eval_mode is not None:
        yield (
            f"{in_eval_mode} draws random numbers, other ones on each rank, also where the model is in eval mode; draw "
            "them in make_batch, from a generator with a seed, and take them from the batch"
        )


def of_model(batch_statistics: str | None, num_parts: int) -> Iterator[str]:
    """Who takes statistics over a batch of which ranks, or micro-batches, have parts."""
    if batch_statistics is not None and num_parts > 1:
        yield (
            f"{batch_statistics} takes its statistics over one of {num_parts} parts of the batch; return model.eval() "
            "from build_model, or use a norm that sees one sample at a time"
        )


def of_loss(loss: float | None, expected: float, num_parts: int) -> Iterator[str]:
    """Of the mean of all parts' losses, and that of one device."""
    if not math.isfinite(expected):
        yield f"one device's own loss is {expected}; look at the model's sizes and at its batch"
    elif loss is not None and num_parts > 1 and expected and abs(loss * num_parts / expected - 1) < CLOSE:
        yield f"the loss is a sum over the batch, of which there are {num_parts} parts; return a mean"


def of_labels(tensors: Mapping[str, torch.Tensor], split_dims: Mapping[str, int], num_parts: int) -> Iterator[str]:
    """Of a batch's tensors, and the tensor dim of those that are split: the first whose parts leave out unequal numbers
    of labels."""
    for name, tensor_dim in split_dims.items():
        tensor = tensors[name]
        if tensor.dtype != torch.int64:
            continue
        if len({int((part == IGNORED).sum()) for part in tensor.chunk(num_parts, tensor_dim)}) > 1:
            yield (
                f"the {num_parts} parts of {name} have unequal numbers of {IGNORED}, which cross entropy leaves out: "
                "the mean of their losses is not the loss of all; sum, and divide by a constant"
            )
            return


def of_batches(used: Any, made: Any, made_again: Any, prints: Sequence[str]) -> Iterator[str]:
    """Of the batch that a step had, two that were made since, and each rank's `fingerprint` of one."""
    odd = next((rank for rank, digest in enumerate(prints) if digest != prints[0]), None)
    if (name := _differing(made, made_again)) is not None:
        yield f"make_batch makes another {name} each time, and so on each rank; draw it from a generator with a seed"
    elif odd is not None:
        yield f"make_batch makes another batch on rank {odd} than on rank 0; make the global batch, alike on every rank"
    elif (name := _differing(used, made)) is not None:
        yield f"a step changes {name} of its batch in place, which the next one is given; change a copy"


def fingerprint(tree: Any) -> str:
    """Equal where all tensors of a batch are."""
    hasher = hashlib.sha256()
    for name, tensor in tensors_of(tree):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        hasher.update(dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def held_gradients(model: nn.Module) -> Gradients:
    """Of this rank: name of each parameter to which part of it is here, and how large its gradient is."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        placements = getattr(gradient, "placements", ())
        if gradient is None or any(placement.is_partial() for placement in placements):
            continue
        coordinate = gradient.device_mesh.get_coordinate() if placements else ()
        part = tuple(at for at, placement in zip(coordinate, placements, strict=True) if not placement.is_replicate())
        local = gradient.to_local() if placements else gradient
        gradients[name] = part, float(local.detach().norm())
    return gradients


def of_replicas(gradients_by_rank: Sequence[Gradients], has_ddp: bool = False) -> Iterator[str]:
    """Of each rank's `held_gradients`: those of the same part of a parameter must be equal, whatever its data.

    Where the plan has DDP, it leaves out what it ignores, and what its forward did not make.
    """
    instead = "take it out of DdpPlan(ignored=...)" if has_ddp else "shard it (fully_shard), replicate(model)"
    first: dict[Any, tuple[int, float]] = {}
    for rank, gradients in enumerate(gradients_by_rank):
        for name, (part, size) in gradients.items():
            first_rank, first_size = first.setdefault((name, part), (rank, size))
            if abs(size - first_size) > CLOSE * max(size, first_size):
                yield (
                    f"ranks {first_rank} and {rank} hold the same part of {name}, and other gradients of it, which "
                    f"are not added up; {instead}, or average it in a hook that after_materialize sets"
                )
                return


def of_another_run(loss: float | None, again: float | None) -> Iterator[str]:
    """Of a rank's loss from the initial values, and of the same once more."""
    if loss is not None and again is not None and abs(loss - again) > CLOSE * max(abs(loss), abs(again)):
        yield (
            "the loss from the same values and batch is another one each time: the model keeps something that is "
            "neither parameter nor buffer, or the step draws random numbers of Python, of numpy or of a generator of "
            "its own; draw them in make_batch, from a generator with a seed"
        )


def of_forward(call: str, has_run: bool, what_it_does: str) -> Iterator[str]:
    """Of a scenario's `call`, whether the model's forward has run in it, and what happens in that."""
    if not has_run:
        yield (
            f"{call} does not go through the model's forward, and that is where {what_it_does}; have it call "
            "model(...), whose forward does what call needs"
        )


def of_own_backward(place: str | None) -> Iterator[str]:
    """Of where forward or loss runs a backward of its own, if they do."""
    if place is not None:
        yield (
            f"forward and loss run a backward of their own ({place}), and the step's backward adds its gradients to "
            "those; return the loss, and leave backward to distbench"
        )


def of_default_dtype(before: torch.dtype, after: torch.dtype) -> Iterator[str]:
    """Of torch's default dtype before a step and after it."""
    if after != before:
        was, now = (str(dtype).removeprefix("torch.") for dtype in (before, after))
        yield (
            f"a step leaves torch's default dtype at {now}, where it was {was}, and so what is made after it is of "
            f"another dtype; have it call set_default_dtype(torch.{was}) when it is done, or name dtypes instead"
        )


def of_coupled_samples(is_coupled: bool, num_parts: int) -> Iterator[str]:
    """Of a step that is the mean of what one device computes of each part of the batch alone."""
    if is_coupled:
        yield (
            f"the loss or the model couples the samples of a batch: one device gives what this step gives where it "
            f"computes each of the {num_parts} parts of the batch alone, and something else for all of it, as with a "
            "contrastive loss, a router's auxiliary loss, a norm over the batch or a mean over a number that differs "
            "between parts; compute it sample by sample, or gather what it couples from all ranks"
        )


def of_factors(factors: set[float], num_ranks: int) -> Iterator[str]:
    """Of what a function of the user's own has gradients divided by, where the scenario does not say so."""
    if odd := sorted(factors - {num_ranks}):
        problem = f"parallelize has gradients divided by {odd[0]:g}, and {num_ranks} ranks have data"
        yield f"{problem}; say gradient_divide_factor={odd[0]:g} where that is meant"


def of_compiled(module: str | None, error: float, loses_gradients: Callable[[], bool]) -> Iterator[str]:
    """Of a module that the user's own code compiles, the largest relative error of a gradient, and whether this torch
    loses gradients of pending inputs."""
    if module is not None and error >= LOST and loses_gradients():
        yield (
            f"{module or 'the model'} is compiled, and torch {torch.__version__} drops the gradient of an input of "
            "compiled code that a collective of tensor parallel still has to fill (pytorch PR 191113); compile by "
            "ParallelPlan(compile=CompilePlan(...)), which waits for such inputs first"
        )


def _differing(tree: Any, other: Any) -> str | None:
    other_tensors = dict(tensors_of(other))
    for name, tensor in tensors_of(tree):
        if name not in other_tensors or not torch.equal(tensor.cpu(), other_tensors[name].cpu()):
            return f"tensor {name}".strip()
    return None


def dropout_of(model: nn.Module) -> str:
    """The first module that drops in train mode; without one, a name for any other source of random numbers."""
    for name, module in model.named_modules():
        is_dropout = "Dropout" in type(module).__name__
        rates = {at: rate for at, rate in vars(module).items() if "dropout" in at or (is_dropout and at == "p")}
        rate = next((rate for rate in rates.values() if isinstance(rate, float) and rate > 0), None)
        if module.training and rate is not None:
            return f"{name} ({type(module).__name__}, {rate:g})"
    return "the model"


def batch_statistics_of(model: nn.Module) -> str | None:
    """The first module that takes statistics over its batch."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            return f"{name} ({type(module).__name__})"
    return None
