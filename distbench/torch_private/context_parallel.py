"""Context parallel: torch's on CUDA; on CPU torch's ring template around the CPU flash kernel; and Ulysses."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from distbench.spec import UserError
from distbench.spec.plan import ULYSSES
from distbench.torch_private.planners import native_all_to_all
from distbench.torch_private.probe import Skipped, Unsupported, replaced, require

KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    buffers: list[torch.Tensor],
    seq_dims: list[int],
    rotate: str,
    load_balance: bool,
    not_restored: list[torch.Tensor],
    kernel: str | None = None,
) -> Iterator[None]:
    """Context of torch's `context_parallel` on CUDA and CPU, with the given rotation and load balance.

    On CPU torch has no dispatch from its ring template to the CPU flash kernel, so `F.scaled_dot_product_attention` is
    replaced. For Ulysses, which torch lacks, that function is replaced on all devices by DTensor's redistribution
    around torch's kernels.

    Args:
        mesh: 1-D mesh of the context parallel ranks.
        buffers: tensors to shard in place over the sequence (each in its `seq_dims`) until the context ends.
        rotate: one of ROTATIONS.
        load_balance: use head-tail chunks instead of contiguous chunks.
        not_restored: buffers that remain sharded afterwards.
        kernel: "flash", "efficient" or "cudnn"; None leaves the choice to torch. Raises `Skipped` if the device lacks
            the kernel.
    """
    require("context parallel")
    require_kernel(kernel, mesh.device_type)
    if rotate == ULYSSES and load_balance:
        raise Skipped(
            "ulysses has no load balance, because each rank has the whole sequence for some heads, which makes causal "
            "work even; use load_balance=False"
        )
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention as module

    options = module._cp_options
    saved = {**vars(options)}
    plain = F.scaled_dot_product_attention  # before torch's context replaces it
    if rotate != ULYSSES:
        module.set_rotate_method(rotate)
    options.enable_load_balance = load_balance
    try:
        sharded = context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=seq_dims, no_restore_buffers=set(not_restored)
        )
        is_cpu, unchanged = mesh.device_type == "cpu", contextlib.nullcontext()
        by_kernel = unchanged if is_cpu or kernel is None else sdpa_kernel(getattr(SDPBackend, KERNELS[kernel]))
        own_attention = (
            _by_heads(mesh, plain) if rotate == ULYSSES else _ring_attention_on_cpu(mesh) if is_cpu else unchanged
        )
        with sharded, by_kernel, own_attention:
            # torch 2.11 does not restore the function if an exception leaves its context, so torch gets no exception.
            raised = None
            try:
                yield
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised
    finally:
        vars(options).update(saved)


@contextlib.contextmanager
def _by_heads(mesh: DeviceMesh, plain: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Ulysses: attention on whole sequences with this rank's share of the heads, by the plain kernel."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise Unsupported(
                "ulysses does not support attn_mask of a rank's part of the sequence; use is_causal, or no mask"
            )
        _require_as_long(query, key)
        _require_heads(mesh, query, key, value)
        exchanged = [_exchanged(tensor, mesh, 2, 1) for tensor in (query, key, value)]
        return _exchanged(plain(*exchanged, None, dropout_p, is_causal, **options), mesh, 1, 2)

    with (
        replaced(F, "scaled_dot_product_attention", _not_compiled(_of_four_dims(attention))),
        native_all_to_all(mesh.device_type == "cpu"),
    ):
        yield


def _exchanged(local: torch.Tensor, mesh: DeviceMesh, source: int, target: int) -> torch.Tensor:
    """Move a shard from one tensor dim to another by an all-to-all, in forward and in backward."""
    dtensor = DTensor.from_local(local, mesh, [Shard(source)], run_check=False)
    exchanged: torch.Tensor = dtensor.redistribute(placements=[Shard(target)]).to_local()
    return exchanged


def _require_heads(mesh: DeviceMesh, *tensors: torch.Tensor) -> None:
    size, heads = mesh.size(), [tensor.shape[1] for tensor in tensors]
    for label, count in zip(("heads", "KV heads"), heads, strict=False):
        if count % size:
            raise UserError(
                f"ulysses splits the {label} of attention, {count} per rank, over {size} ranks of context parallel, "
                f"but {size} does not divide {count}; use a size that divides {count}, or allgather or alltoall"
            )


def _require_as_long(query: torch.Tensor, key: torch.Tensor) -> None:
    if query.shape[2] != key.shape[2]:
        raise UserError(
            f"context parallel splits one sequence, but attention has {query.shape[2]} queries and {key.shape[2]} "
            "keys, as in a decode step over a cache; leave cp out"
        )


def require_kernel(kernel: str | None, device_type: str) -> None:
    """Raise `Skipped` if a device has no ring attention with this kernel; a CPU has only the flash kernel."""
    if kernel not in (None, "flash") and device_type == "cpu":
        raise Skipped(f"a CPU has no context parallel with kernel {kernel!r}, only the flash kernel; use --device cuda")


@dataclass(frozen=True)
class FlexAttention:
    """FlexAttention with queries of a rank's part of the sequence and all keys.

    Args:
        call: computes the output of this rank's queries.
        whole: gathers an output along the sequence, in its original order.
        positions: the positions in the sequence of each rank's queries, (ranks, queries per rank).
    """

    call: Callable[[], torch.Tensor]
    whole: Callable[[torch.Tensor], torch.Tensor]
    positions: torch.Tensor


def flex_attention_over(
    mesh: DeviceMesh,
    tensors: Sequence[torch.Tensor],
    mask_mod: Callable[..., torch.Tensor],
    balancer: str,
    documents: Sequence[int],
) -> FlexAttention:
    """Return torch's FlexAttention under context parallel; keys and values are gathered in each call.

    Args:
        mesh: 1-D mesh of the context parallel ranks.
        tensors: query, key and value of the whole sequence, each (batch, heads, sequence, head).
        mask_mod: FlexAttention's `(batch, head, query, key) -> whether the query attends to the key`.
        balancer: "none", "head_tail", "per_document" or "ptrr".
        documents: lengths of the documents of the sequence, for "per_document".
    """
    require("FlexAttention under context parallel")
    from torch.distributed.tensor.experimental._context_parallel import _attention as module
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Attention(nn.Module):
        def forward(self, query: Any, key: Any, value: Any, block_mask: Any) -> Any:
            return flex_attention(query, key, value, block_mask=block_mask)

    size, device, length = mesh.size(), tensors[0].device, tensors[0].shape[2]
    mask = create_block_mask(mask_mod, 1, 1, length, length, device=str(device))
    balance: Any = {
        "none": lambda: None,
        "head_tail": lambda: balancers._HeadTailLoadBalancer(length, size, device),
        "per_document": lambda: balancers._PerDocumentHeadTailLoadBalancer([list(documents)], size, device),
        "ptrr": lambda: balancers._PTRRLoadBalancer(mask, size),
    }[balancer]()
    options = {**vars(module._cp_options)}
    try:
        # torch would compile the function that makes a mask, for several seconds on each rank.
        with replaced(module, "_compiled_create_block_mask", create_block_mask):
            buffers: list[Any] = [*tensors, mask]
            query, key, value, own_mask = module._context_parallel_shard(mesh, buffers, [2] * len(buffers), balance)
    finally:
        vars(module._cp_options).update(options)
    style = module._ContextParallel(seq_dim=2, attention_type=module._ContextParallel.AttentionType.FLEX)
    attention = parallelize_module(Attention(), mesh, style)
    order = torch.arange(length)[None] if balance is None else balance._generate_indices().cpu()

    def whole(output: torch.Tensor) -> torch.Tensor:
        # Without a balancer torch would use head-tail chunks.
        with replaced(module._cp_options, "enable_load_balance", balance is not None):
            unsharded: list[torch.Tensor] = module.context_parallel_unshard(mesh, [output], [2], balance)
        return unsharded[0]

    return FlexAttention(lambda: attention(query, key, value, own_mask), whole, order[0].view(size, -1))


def whole_sequence(local: torch.Tensor, mesh: DeviceMesh, seq_dim: int) -> torch.Tensor:
    """Gather a tensor whose sequence is sharded over ranks, in its original order, inside `context_parallel`.

    This is torch's `context_parallel_unshard` with a backward, in which each rank uses its share of the gradient times
    the number of ranks, because all ranks compute the same loss and gradients are averaged over ranks.

    Args:
        local: (batch, ..., share of the sequence, ...); `seq_dim` is not 0.
        mesh: 1-D mesh of the context parallel ranks.
    """
    require("context parallel outputs")
    sequence: torch.Tensor = _WholeSequence.apply(local, mesh, seq_dim)
    return sequence


class _WholeSequence(torch.autograd.Function):
    """All-gather that also undoes the load balance; backward uses this rank's share, without communication."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mesh: DeviceMesh, seq_dim: int) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as module

        length = local.shape[seq_dim] * mesh.size()
        ctx.balancer = module._create_default_load_balancer(length, mesh.size(), local.device)
        ctx.mesh, ctx.seq_dim = mesh, seq_dim
        unsharded: list[torch.Tensor] = module.context_parallel_unshard(mesh, [local], [seq_dim], ctx.balancer)
        return unsharded[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as module

        grads: Any = module._context_parallel_buffers(ctx.mesh, [grad_outputs[0]], [ctx.seq_dim], ctx.balancer)
        return grads[0] * ctx.mesh.size(), None, None


@contextlib.contextmanager
def _ring_attention_on_cpu(mesh: DeviceMesh) -> Iterator[None]:
    require("context parallel on CPU")
    group = mesh.get_group()

    def ring_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p or enable_gqa:
            raise Unsupported("torch's ring for context parallel on CPU has no attn_mask, dropout_p or enable_gqa")
        _require_as_long(query, key)
        output: torch.Tensor = _RingAttention.apply(query, key, value, group, is_causal, scale)
        return output

    with replaced(F, "scaled_dot_product_attention", _not_compiled(_of_four_dims(ring_attention))):
        yield


def _of_four_dims(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Extend attention of (batch, heads, sequence, head) to tensors of any number of dims: the dim before the sequence
    counts as heads, and all dims before that as the batch.
    """

    def of_any(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any, **named: Any
    ) -> torch.Tensor:
        if query.ndim == 4:
            return attention(query, key, value, *options, **named)
        four = [tensor.reshape(-1, *(1, *tensor.shape)[-3:]) for tensor in (query, key, value)]
        return attention(*four, *options, **named).reshape(*query.shape[:-1], value.shape[-1])

    return of_any


def _not_compiled(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # A compiler drops unused computations of a rank, and other ranks would wait for that part of the ring.
    return torch.compiler.disable(attention)  # type: ignore[no-any-return]


class _RingAttention(torch.autograd.Function):
    """torch's ring-attention template around the CPU flash kernel; q, k, v are (batch, heads, local sequence, head)."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, group: Any, is_causal: bool, scale: float | None) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as module

        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ctx.group, ctx.options = group, {"is_causal": is_causal, "dropout_p": 0.0, "scale": scale}
        out, logsumexp, *_ = module._templated_ring_attention(
            group, 2, op, query=query, key=key, value=value, **ctx.options
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as module

        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        saved = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors, strict=True))
        gradient = {"grad_out": grad_outputs[0].contiguous(), "grad_out_name": "grad_out"}
        grads = module._templated_ring_attention_backward(ctx.group, 2, op, **gradient, **saved, **ctx.options)
        return (*grads[:3], None, None, None)
