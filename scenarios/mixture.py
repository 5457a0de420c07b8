"""A token-choice mixture of experts, and the parallel style that distributes its experts over ranks.

Each token goes to its `top_k` experts. Under expert parallel each rank has some of the experts and its own tokens. An
all-to-all sends each token to the rank of its expert (dispatch), and a second one returns the result (combine).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Llama
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from distbench.spec import UserError
from distbench.spec.expert_loads import choice_ends


class Experts(nn.Module):
    """SwiGLU experts: (tokens, dim), sorted by expert, to the same shape.

    `counts` is the number of tokens per expert; None for equal numbers, which need no synchronization with the host.
    """

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.sharers: Any = None  # the mesh of ranks with the same tokens and other experts

    def forward(self, x: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        weights = [own_part(weight) for weight in (self.w1, self.w2, self.w3)]
        if counts is None:
            one, two, three = (weight.transpose(1, 2) for weight in weights)
            even = x.unflatten(0, (len(one), -1))
            return ((F.silu(even @ one) * (even @ three)) @ two).flatten(0, 1)
        w1, w2, w3 = (weight.unbind() for weight in weights)
        groups = x.split(counts.tolist())
        outs = [
            F.linear(F.silu(F.linear(tokens, one)) * F.linear(tokens, three), two)
            for tokens, one, two, three in zip(groups, w1, w2, w3, strict=True)
        ]
        return torch.cat(outs)


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a weight; ranks with the same shard have partial gradients."""
    if not isinstance(weight, DTensor):
        return weight
    gradients = [placement if placement.is_shard() else Partial() for placement in weight.placements]
    return weight.to_local(grad_placements=gradients)


class Router(nn.Linear):
    """The router's scores of each expert for each token; replicated under tensor parallel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, own_part(self.weight))


class MixtureOfExperts(nn.Module):
    """Router and experts: (batch, sequence, dim) to the same shape.

    Args:
        load: weight of each expert. Of every sequence's choices, each expert gets its share by weight. The router's
            scores weigh the results.
        capacity: the most tokens of a sequence per expert, as a multiple of its even share; other tokens are dropped,
            and all exchanges have equal sizes. 0: no token is dropped.
    """

    def __init__(
        self, num_experts: int, top_k: int, dim: int, hidden: int, load: Sequence[float], capacity: float = 0.0
    ) -> None:
        super().__init__()
        self.router = Router(dim, num_experts, bias=False)
        self.experts = Experts(num_experts, dim, hidden)
        self.num_experts, self.top_k, self.load, self.capacity = num_experts, top_k, load, capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        chosen = self._chosen(scores)
        gates = scores.gather(-1, chosen)
        gates = gates / gates.sum(-1, keepdim=True)
        tokens = x.flatten(0, 1).repeat_interleave(self.top_k, 0)
        through = self._with_capacity if self.capacity else self._dropless
        out = through(tokens, chosen.flatten(1)) * gates.reshape(-1, 1)
        return out.unflatten(0, (*x.shape[:2], self.top_k)).sum(2)

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, top_k): the experts of each token."""
        length, device = scores.shape[1], scores.device
        ends = torch.tensor(choice_ends(self.load, length * self.top_k), device=device)
        choices = torch.searchsorted(ends, torch.arange(length * self.top_k, device=device), right=True)
        return choices.reshape(1, self.top_k, length).transpose(1, 2).expand(len(scores), -1, -1)

    def _dropless(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        out = self.experts(tokens[order], counts)
        return torch.empty_like(out).index_copy(0, order, out)

    def _with_capacity(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        batch, num_choices = chosen.shape
        slots = max(1, round(self.capacity * num_choices / self.num_experts))
        is_for = F.one_hot(chosen, self.num_experts)
        place = (is_for.cumsum(1) * is_for).sum(-1) - 1
        sequence = torch.arange(batch, device=chosen.device)[:, None]
        size = self.num_experts * batch * slots
        # The last slot is for dropped tokens.
        slot = torch.where(place < slots, (chosen * batch + sequence) * slots + place, size).flatten()
        filled = tokens.new_zeros(size + 1, tokens.shape[1]).index_copy(0, slot, tokens)[:-1]
        out = self.experts(filled, None)
        return torch.cat((out, out.new_zeros(1, out.shape[1])))[slot]


class AllToAll(torch.autograd.Function):
    """Exchange rows between the ranks of a group: `sent` to each, `received` from each; None for equally many.

    Backward exchanges the gradients in the opposite direction.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits = (received, sent, group)
        out = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return AllToAll.apply(gradients[0], *ctx.splits), None, None, None


class ExpertParallel(ParallelStyle):
    """Shard experts over a mesh dim on tensor dim 0, with dispatch of tokens before forward and combine afterwards.

    A second mesh dim shards each expert, columnwise and then rowwise: the outputs are partial sums over that mesh dim.
    If ranks of tensor parallel have whole experts instead, each rank dispatches its share of the common tokens. Its
    output has only that share, so the outputs are also partial sums.
    """

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh, self._shard, self._dispatch, self._combine)

    def _shard(self, name: str, module: nn.Module, mesh: Any) -> None:
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(0), Shard(2 if attribute == "w2" else 1)][: mesh.ndim]
            module.register_parameter(attribute, nn.Parameter(distribute_tensor(parameter, mesh, placements)))

    def _dispatch(self, module: Any, inputs: Any, mesh: Any) -> Any:
        rows, counts = inputs
        group, size = mesh.get_group(0), mesh.size(0)
        module.share = None
        if module.sharers is not None:
            rows, counts = self._own_share(module, rows, counts)
        if counts is None:
            module.exchange = (None, None, None, group)
            return by_expert(AllToAll.apply(rows, None, None, group), size, len(own_part(module.w1))), None
        # The initial value assumes that every rank sends the same numbers as this rank.
        arriving = counts.clone()
        dist.all_to_all_single(arriving, counts, group=group)
        sent = counts.reshape(size, -1).sum(1).tolist()
        received = arriving.reshape(size, -1).sum(1).tolist()
        rows = AllToAll.apply(rows, sent, received, group)
        # Received rows are sorted by rank, then expert; the experts need them sorted by expert.
        num_own = len(counts) // size
        expert = torch.arange(num_own, device=counts.device).repeat(size).repeat_interleave(arriving)
        order = expert.argsort(stable=True)
        module.exchange = (order, received, sent, group)
        return rows[order], arriving.reshape(size, num_own).sum(0)

    def _own_share(self, module: Any, rows: torch.Tensor, counts: Any) -> Any:
        """Every n-th row of the n ranks' common rows, so of each expert's rows; and the number per expert."""
        index, size = module.sharers.get_local_rank(), module.sharers.size()
        if counts is None and len(rows) % (size * len(module.w1)):
            slots = f"{len(rows) // len(module.w1)} token slots per expert"
            raise UserError(f"{slots} cannot be split over {size} ranks along tp; change batch, sequence or capacity")
        own = torch.arange(index, len(rows), size, device=rows.device)
        module.share = (own, len(rows))
        if counts is not None:
            ends = counts.cumsum(0)
            expert = torch.searchsorted(ends, own, right=True)
            counts = torch.bincount(expert, minlength=len(counts))
        return rows[own], counts

    def _combine(self, module: Any, out: Any, mesh: Any) -> Any:
        order, received, sent, group = module.exchange
        if order is None:
            out = AllToAll.apply(by_expert(out, len(own_part(module.w1)), mesh.size(0)), None, None, group)
        else:
            back = torch.empty_like(out).index_copy(0, order, out)
            out = AllToAll.apply(back, received, sent, group)
        if module.share is None:
            return out
        own, num_rows = module.share
        return out.new_zeros(num_rows, out.shape[1]).index_copy(0, own, out)


class TensorParallelMixture(ParallelStyle):
    """A mixture with experts sharded over the mesh dim of tensor parallel. Its input, sharded on the sequence, is
    all-gathered; its output, a partial sum on each rank, is reduce-scattered.

    Args:
        whole_experts: the mesh dim does not shard experts: expert parallel distributes them over its ranks too.
    """

    def __init__(self, whole_experts: bool = False) -> None:
        super().__init__()
        self.whole_experts = whole_experts

    def _apply(self, module: Any, device_mesh: Any) -> nn.Module:
        router = module.router
        module.experts.sharers = device_mesh if self.whole_experts else None
        router.weight = nn.Parameter(distribute_tensor(router.weight, device_mesh, [Replicate()]))
        module.register_forward_pre_hook(lambda _, inputs: self._gathered(inputs[0], device_mesh))
        module.register_forward_hook(lambda _, inputs, out: self._summed(out, device_mesh))
        return module

    def _gathered(self, x: torch.Tensor, mesh: Any) -> torch.Tensor:
        whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _summed(self, out: torch.Tensor, mesh: Any) -> torch.Tensor:
        parts = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Shard(1)]).to_local()


def by_expert(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Reorder rows from sorted by `outer` and then `inner` to sorted by `inner` and then `outer`; equal counts."""
    return rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


class MoeLlama(Llama):
    """A llama-like stack whose feed-forwards are mixtures of experts."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        loads: Sequence[Sequence[float]],
        capacity: float,
    ) -> None:
        super().__init__(vocab_size, dim, num_layers, num_heads, hidden)
        for layer, weights in zip(self.layers, loads, strict=True):
            layer.feed_forward = MixtureOfExperts(num_experts, top_k, dim, hidden, weights, capacity)
