"""What differs on accelerators and needs none to be tried: threads of autograd, precision, ranks that vanish."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import PATIENCE_S

from distbench.cases import step_correctness
from distbench.cases.step_correctness import StepCheck, full_precision
from distbench.observe.module_attribution import RunningModules
from distbench.ranks import lost_ranks
from distbench.ranks.lost_ranks import Presence


def test_what_is_computed_again_on_autograds_thread_owns_no_node_of_the_first_forward() -> None:
    """That thread numbers its nodes from the beginning: its short span lies within the long one of another module."""
    modules = RunningModules()
    parameter = torch.ones(1, requires_grad=True)

    def forward(name: str, num_nodes: int) -> int:
        modules.enter(name)
        begun = torch.autograd._get_sequence_nr()
        out = parameter
        for _ in range(num_nodes):
            out = out * 2
        modules.leave()
        return begun

    begun = forward("first", 50)
    again = threading.Thread(target=forward, args=("recomputed", 10))
    again.start()
    again.join()
    assert {modules.owner(None, begun + at) for at in range(50)} == {"first"}
    assert modules.owner(None, begun + 50) is None


def test_a_check_computes_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor's image may have set another one, as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE does."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    seen = []

    class Step:
        def restart(self) -> None:
            seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
            raise ArithmeticError

    class Context:
        check = "full"

    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ArithmeticError):
            StepCheck(Step(), None, Context())()  # type: ignore[arg-type]  # it raises before it looks at them
        assert seen == [("highest", False)]
        assert torch.get_float32_matmul_precision() == "high"
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before[0])
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize("where", ["cuda.matmul", "cudnn", "cudnn.conv", "mkldnn.matmul"])
def test_precision_that_was_set_torchs_newer_way_is_lifted_too(where: str) -> None:
    """torch refuses to read the older way's where the newer one was used, and every check would have raised."""
    one: Any = torch.backends
    for name in where.split("."):
        one = getattr(one, name)
    before = one.fp32_precision
    one.fp32_precision = "tf32"
    try:
        with full_precision():
            assert one.fp32_precision == "tf32" if where == "cudnn" else one.fp32_precision == "ieee"
            assert torch.backends.cuda.matmul.fp32_precision == "ieee" == torch.backends.cudnn.conv.fp32_precision
            assert torch.get_float32_matmul_precision() == "highest"
        assert one.fp32_precision == "tf32"
    finally:
        one.fp32_precision = before


@pytest.mark.parametrize(("device", "value", "allowed"), [("sim", "1", 5e-2), ("sim", "0", 1e-5), ("cpu", "1", 1e-5)])
def test_what_the_libraries_round_on_their_own_is_allowed(
    monkeypatch: pytest.MonkeyPatch, device: str, value: str, allowed: float
) -> None:
    class Any_:
        gradient_scale, tolerance, fsdp, type = 1.0, None, None, device

        def __getattr__(self, name: str) -> "Any_":
            return self

    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    monkeypatch.setattr(step_correctness, "lowest_precision", lambda *_: torch.float32)
    monkeypatch.setattr(step_correctness, "reduction_rounding", lambda *_: 0.0)
    one: Any = Any_()
    assert StepCheck(one, one, one)._allowance(one).tolerance == allowed


class Keys(dict[str, str]):
    """As much of a store as `Presence` uses."""

    set = dict.__setitem__

    def get(self, key: str) -> str:  # type: ignore[override]
        return self[key]


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Presence], list[tuple[int, str]]]]:
    """Three ranks, as threads of this process, and (rank, what it was told) of those who heard of an end."""
    monkeypatch.setattr(lost_ranks, "GONE_AFTER_S", 0.0)
    store, output = Keys(), []

    def teller(rank: int) -> Callable[[str], None]:
        return lambda message: output.append((rank, message))

    ranks = [Presence(store, rank, ("a", "a", "b"), "127.0.0.1", teller(rank)) for rank in range(3)]  # type: ignore[arg-type]
    yield ranks, output
    for one in ranks:
        one.leave()
        if one._link is not None:
            with contextlib.suppress(OSError):
                one._link.shutdown(2)
    with contextlib.suppress(OSError):  # rank 0's thread may wait for a connection, when all others have ended
        socket.create_connection(("127.0.0.1", int(store["presence"]))).close()
    wait_for(lambda: not any("_follow" in thread.name for thread in threading.enumerate()))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_vanishes_is_named_to_all_others(present: tuple[list[Presence], list[tuple[int, str]]]) -> None:
    """As a process that is killed does: its connection is closed by the kernel, and nothing is said."""
    ranks, output = present
    wait_for(lambda: set(ranks[0]._ranks.values()) == {1, 2})
    vanish(ranks[2])
    wait_for(lambda: {rank for rank, _ in output} >= {0, 1})
    # A rank's process ends when it is told; here rank 1 closes its connection, so that rank 0 may miss it as well.
    assert {rank: next(message for one, message in output if one == rank) for rank in (0, 1)} == {0: TOLD, 1: TOLD}


TOLD = "rank 2 has ended while the others continued"


def vanish(rank: Presence) -> None:
    assert rank._link is not None
    rank._is_leaving = True  # this rank's own thread is no longer there to speak
    rank._link.shutdown(2)


def test_rank_0_is_missed_too(present: tuple[list[Presence], list[tuple[int, str]]]) -> None:
    ranks, output = present
    wait_for(lambda: set(ranks[0]._ranks.values()) == {1, 2})
    ranks[0]._is_leaving = True
    for link in list(ranks[0]._ranks):
        link.shutdown(2)
    wait_for(lambda: len(output) == 2)
    assert {message for _, message in output} == {"rank 0 has ended while the others continued"}


def test_ranks_that_leave_together_miss_nobody(present: tuple[list[Presence], list[tuple[int, str]]]) -> None:
    ranks, message = present
    wait_for(lambda: set(ranks[0]._ranks.values()) == {1, 2})
    for one in ranks:
        one.leave()
    for one in ranks[1:]:
        assert one._link is not None
        one._link.shutdown(2)
    time.sleep(0.2)
    assert message == []
