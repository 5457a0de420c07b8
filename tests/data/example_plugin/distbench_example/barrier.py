"""A kind of case: barriers over all ranks, `Scenario(plugins={"barrier": (1, 4)})` for 1 and for 4 per iteration."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch.distributed as dist

from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.ranks.context import RankContext
from distbench.records.run_file import Case


def barrier_cases(declared: Sequence[int], label: str, context: RankContext) -> Iterator[CaseSpec]:
    """Yield a case per number of barriers; all ranks yield the same cases in the same order."""
    for count in declared:
        case = Case(f"barrier/{count}/{label}", "barrier", {"count": count})
        yield CaseSpec(case, partial(_open, count, context), group="barrier")


@contextlib.contextmanager
def _open(count: int, context: RankContext) -> Iterator[OpenedCase]:
    passed = 0

    def call(stamp: object) -> None:
        nonlocal passed
        for _ in range(count):
            dist.barrier()
            passed += 1

    def check() -> str | None:
        before = passed
        call(None)
        return None if passed == before + count else f"{passed - before} barriers, {count} were declared"

    fields = {"group_size": context.mesh.size(), "mesh_dim": "x".join(context.mesh_dims)}
    yield OpenedCase(call, check, fields=fields)
