"""What operators take on every rank at once, and collectives in groups of every size: what a hardware file is made of.

Ranks of one machine share its cores, caches and memory, so an operator's time is that of the slowest rank while all of
them run it. Short ones are repeated for longer than the scheduler lets one process run.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from distbench.cases.collective import OPERATIONS, sizes_of
from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.ranks.context import TORCH_DTYPES, RankContext
from distbench.records.run_file import DTYPE_BYTES, Case
from distbench.spec import Scenario
from distbench.spec.mesh import dim_shape, flattened, groups_of

MATMUL_SIDES = {"f32": (64, 192, 512, 1024), "bf16": (64, 192, 512, 1024)}
# Bytes that one elementwise operator reads and writes: within a core's cache, and far beyond it.
MEMORY_BYTES = (49152, 393216, 3145728, 25165824, 50331648)
ATTENTION_SHAPES = ((4, 4, 64, 64), (1, 8, 512, 64))  # batch, heads, sequence, head dim
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# Up to what glibc takes from its heap: from 32 MiB on each buffer is mapped anew, page by page.
PAYLOAD_BYTES = (4096, 131072, 2097152, 8388608, 25165824)
# What one call of a case shall do, so that it lasts some tens of milliseconds on a core of today.
CALL_FLOPS, CALL_BYTES = 1e9, 2.5e8
CALL_PAYLOAD_BYTES, MOST_REPEATS = 1 << 21, 8


class Work(NamedTuple):
    """Operators to time.

    Args:
        call: runs each once.
        amount: floating point operations or bytes of one of them.
        num_operators: how many they are.
        most: of all amounts of a call of the case.
    """

    call: Callable[[], object]
    amount: int
    num_operators: int
    most: float

    @property
    def repeats(self) -> int:
        """How often the call is made in one sample of the case."""
        return max(round(self.most / self.amount / self.num_operators), 1)


def compute_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Matmuls by dtype and size, attention by shape, elementwise operators and collectives by bytes."""
    count = scenario.compute
    if not count:
        return
    for dtype, sides in MATMUL_SIDES.items():
        for side in sides[:count]:
            yield _case_spec(f"matmul_{dtype}", str(side), partial(matmul, side, TORCH_DTYPES[dtype]), context)
    for num_bytes in MEMORY_BYTES[:count]:
        yield _case_spec("memory", str(num_bytes), partial(elementwise, num_bytes), context)
    for shape in ATTENTION_SHAPES[:count]:
        name = "x".join(map(str, shape))
        yield _case_spec("attention", name, partial(attention, shape), context)
        yield _case_spec("attention_backward", name, partial(attention_backward, shape), context)
    for lies, group_size, stride in groups_measured(context.mesh.size(), context.hosts):
        for op in COLLECTIVES:
            for size_bytes in PAYLOAD_BYTES[:count]:
                yield _collective_spec(op, lies, group_size, stride, size_bytes, context)


def groups_measured(num_ranks: int, hosts: Sequence[str]) -> list[tuple[str, int, int]]:
    """(how they lie on hosts, empty for one host; ranks, ranks apart) of the groups in which collectives are timed.

    Neighbours of every size; on several hosts also groups that lie on them otherwise.
    """
    neighbours = [(size, 1) for size in range(2, num_ranks + 1) if num_ranks % size == 0]
    if len(set(hosts)) < 2:
        return [("", *sizes) for sizes in neighbours]
    by_shape = {dim_shape(groups_of(*sizes, num_ranks), hosts): sizes for sizes in neighbours}
    for shape, size, stride in flattened({"all": num_ranks}, hosts):
        by_shape.setdefault(shape, (size, stride))
    return [(shape, *sizes) for shape, sizes in by_shape.items()]


def matmul(side: int, dtype: torch.dtype, device: torch.device) -> Work:
    """A linear layer's three matmuls: its output, and the gradients of its input and of its weight."""
    inputs, weight, gradient = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))

    def call() -> None:
        torch.mm(inputs, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), inputs)

    flops = 2 * side**3
    return Work(call, flops, 3, CALL_FLOPS)


def elementwise(num_bytes: int, device: torch.device) -> Work:
    """Four operators of a model and its optimizer, each of which touches so many bytes in all."""
    left, right = torch.randn(2, num_bytes // 12, device=device)
    tensor = torch.randn(num_bytes // 8, device=device)

    def call() -> None:
        left * right
        F.silu(tensor)
        left.lerp_(right, 0.5)
        tensor.clone()

    return Work(call, num_bytes, 4, CALL_BYTES)


def attention(shape: tuple[int, ...], device: torch.device) -> Work:
    """Causal attention, as scaled_dot_product_attention runs it here."""
    query, key, value = torch.randn(3, *shape, device=device)
    flops = attention_flops(shape)
    call = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    return Work(call, flops, 1, CALL_FLOPS)


def attention_backward(shape: tuple[int, ...], device: torch.device) -> Work:
    """Its gradients."""
    inputs = [tensor.requires_grad_() for tensor in torch.randn(3, *shape, device=device).unbind()]
    query, key, value = inputs
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradient = torch.ones_like(output)
    flops = attention_flops(shape) * 5 // 2
    call = partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True)
    return Work(call, flops, 1, CALL_FLOPS)


def attention_flops(shape: tuple[int, ...]) -> int:
    """Floating point operations of causal attention's forward, counted half as recordings have them."""
    batch, heads, sequence, head_dim = shape
    return 2 * batch * heads * sequence * sequence * head_dim


def _case_spec(what: str, size: str, make: Callable[[torch.device], Work], context: RankContext) -> CaseSpec:
    case = Case(f"compute/{what}/{size}", "compute", {"what": what, "size": size})
    return CaseSpec(case, partial(_open, make, context))


@contextlib.contextmanager
def _open(make: Callable[[torch.device], Work], context: RankContext) -> Iterator[OpenedCase]:
    work = make(context.device)

    def call(_: object) -> None:
        for _ in range(work.repeats):
            work.call()

    count = work.repeats * work.num_operators
    yield _opened(call, work.amount, count, context.mesh.size(), "x".join(context.mesh_dims))


def _collective_spec(
    op: str, lies: str, group_size: int, stride: int, size_bytes: int, context: RankContext
) -> CaseSpec:
    params = {"what": "collective", "op": op, "group_size": group_size, "size_bytes": size_bytes}
    case = Case(f"compute/{op}/{lies or group_size}/{size_bytes}", "compute", {**params, "lies": lies})
    return CaseSpec(case, partial(_open_collective, op, group_size, stride, size_bytes, context))


_GROUPS: dict[tuple[int, int, int], Any] = {}


def strided_group(group_size: int, stride: int, world_size: int) -> Any:
    """This rank's group of so many ranks, so far apart; made once a process, by all ranks together."""
    key = group_size, stride, world_size
    if key not in _GROUPS:
        groups = [list(group) for group in groups_of(*key)]
        _GROUPS[key] = dist.new_subgroups_by_enumeration(groups)[0] if len(groups) > 1 else dist.group.WORLD
    return _GROUPS[key]


@contextlib.contextmanager
def _open_collective(
    op: str, group_size: int, stride: int, size_bytes: int, context: RankContext
) -> Iterator[OpenedCase]:
    group = strided_group(group_size, stride, context.mesh.size())
    sizes = sizes_of(op, size_bytes, "f32", group_size)
    inputs = torch.zeros(sizes.given, device=context.device)
    output = inputs if op in ("all_reduce", "broadcast") else torch.zeros(sizes.got, device=context.device)
    repeats = min(max(CALL_PAYLOAD_BYTES // size_bytes, 1), MOST_REPEATS)

    def call(_: object) -> None:
        for _ in range(repeats):
            OPERATIONS[op](output, inputs, group)

    yield _opened(call, sizes.total * DTYPE_BYTES["f32"], repeats, group_size, f"groups of {group_size}", group)


def _opened(
    call: Callable[[object], None], amount: int, repeats: int, group_size: int, mesh_dim: str, starts_on: Any = None
) -> OpenedCase:
    fields = {
        "group_size": group_size,
        "mesh_dim": mesh_dim,
        "counters": {"amount": amount, "repeats": repeats},
    }
    return OpenedCase(call, lambda: None, fields=fields, starts_on=starts_on)
