"""Async TP of a recorded step: parts of collectives and matmuls, worked by hand."""

from dataclasses import replace

import pytest
from test_simulate_clock import HEAD, elementwise, gather, machine, matmul, run

from distbench.simulate.recording import Collective, Event, EventRecorded, EventWaited
from distbench.simulate.simulation import Simulation


def exchange(kind: str, seconds: float) -> Collective:
    """A collective of TP between two ranks."""
    return gather(1, seconds)._replace(kind=kind, source="tp", mesh_dim="tp")


def copy() -> Event:
    return elementwise(1, [], [])._replace(name="aten.cat.default")


def step_s(*events: Event, is_async: bool) -> float:
    recording = run(*events, head=replace(HEAD, mesh={"tp": 2}, async_tp=is_async))
    (simulation,) = Simulation.all_of([recording], machine(), expandable=False, float8=())
    assert is_async == any("async TP" in rule for rule in simulation.not_simulated)
    return simulation.timed.step_s


def test_a_matmul_runs_while_its_next_part_is_gathered() -> None:
    events = (exchange("all_gather", 2), EventRecorded(1, 7), EventWaited(0, 7), copy(), matmul(0, 4), matmul(0, 1))
    assert step_s(*events, is_async=False) == pytest.approx(2 + 1 + 4 + 1)
    # Gathers end after 1 and 2 s; the first half of the matmul runs from 1 to 3 s. The copy is not needed.
    assert step_s(*events, is_async=True) == pytest.approx(1 + 4 + 1)
    slow = (exchange("all_gather", 8), *events[1:])
    assert step_s(*slow, is_async=True) == pytest.approx(8 + 2 + 1)


def test_a_part_is_scattered_while_the_next_part_is_computed() -> None:
    events = (
        matmul(0, 4),
        copy(),
        EventRecorded(0, 3),
        EventWaited(1, 3),
        exchange("reduce_scatter", 2),
        EventRecorded(1, 4),
        EventWaited(0, 4),
        elementwise(1, [], []),
    )
    assert step_s(*events, is_async=False) == pytest.approx(4 + 1 + 2 + 1)
    assert step_s(*events, is_async=True) == pytest.approx(4 + 1 + 1)


def test_collectives_without_a_matmul_and_those_of_fsdp_remain() -> None:
    alone = (exchange("all_gather", 2), EventRecorded(1, 7), EventWaited(0, 7), elementwise(1, [], []), matmul(0, 4))
    assert step_s(*alone, is_async=True) == step_s(*alone, is_async=False) == pytest.approx(7)
    fsdp = (gather(1, 2), *alone[1:3], matmul(0, 4))
    assert step_s(*fsdp, is_async=True) == pytest.approx(6)
