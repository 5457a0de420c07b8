"""Collectives among a profiler's kernels: a trace built by hand from kineto's documented fields, times in us."""

import pytest

from distbench.worker.tracing.attribution import Communication
from distbench.worker.tracing.kernels import Ran, collectives_among, matched, phases_among
from distbench.worker.tracing.profiled import step_of_events


def kernel(name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}


def nccl(collective: str, group: str, ts: float, dur: float) -> dict[str, object]:
    told = {
        "Collective name": collective,
        "Process Group Name": group,
        "In msg nelems": 4,
        "Out msg nelems": 8,
        "Group size": 2,
        "dtype": "Float",
    }
    return kernel("ncclDevKernel_WhateverItIsCalledNow", ts, dur, **told)


EVENTS = [
    kernel("gemm", 0, 100),
    nccl("_allgather_base", "1", 50, 100),  # 50 to 150; gemm covers 50 to 100, the copy 140 to 150
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 140, "dur": 30, "args": {}},
    nccl("allreduce", "2", 60, 20),  # wholly under the gemm
    nccl("_reduce_scatter_base", "1", 200, 10),  # nothing beside it
    nccl("allreduce", "2", 205, 10),  # another collective hides nothing
    {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": 40, "dur": 5, "args": {"Collective name": "x"}},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "distbench:backward", "ts": 190, "dur": 30, "args": {}},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "distbench:forward", "ts": 0, "dur": 170, "args": {}},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "Optimizer.step", "ts": 0, "dur": 1, "args": {}},
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
]
GROUPS = {"1": "0,1", "2": "0,2", "3": "0"}


def row(kind: str, group: str, group_size: int = 2) -> Communication:
    return Communication("forward", "tp", kind, "op", "tp", group_size, "f32", 16, "", True, "", None, group)


def test_a_collective_is_known_by_its_metadata_and_exposed_where_nothing_else_runs() -> None:
    found = collectives_among(EVENTS)
    assert [(ran.kind, ran.group) for ran in found] == [
        ("all_gather", "1"),
        ("all_reduce", "2"),
        ("reduce_scatter", "1"),
        ("all_reduce", "2"),
    ]
    assert [ran.exposed_s * 1e6 for ran in found] == pytest.approx([40, 0, 10, 10])
    assert [(ran.ended_s - ran.begun_s) * 1e6 for ran in found] == pytest.approx([100, 20, 10, 10])


def test_phases_are_the_devices_own_in_order() -> None:
    assert [(name, round(begun * 1e6), round(ended * 1e6)) for name, begun, ended in phases_among(EVENTS)] == [
        ("forward", 0, 170),
        ("backward", 190, 220),
    ]


def test_the_nth_collective_of_a_group_is_its_nth_kernel() -> None:
    rows = [
        row("all_reduce", "0,2"),
        row("all_gather", "0,1"),
        row("all_gather", "0", 1),  # alone in its group: NCCL may run a copy instead
        row("reduce_scatter", "0,1"),
        row("all_reduce", "0,2"),
    ]
    found, why = matched(rows, collectives_among([nccl("_allgather_base", "3", 300, 1), *EVENTS]), GROUPS)
    assert why is None
    assert [None if ran is None else round(ran.begun_s * 1e6) for ran in found] == [60, 50, None, 200, 205]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("all_gather", "0,1")], "only among kernels all_reduce over 0,2: 2"),
        ([row("all_to_all", "0,1")], "no kernel of all_to_all over 0,1: 1"),
    ],
)
def test_kernels_that_are_not_the_collectives_are_told_and_not_guessed(rows: list[Communication], said: str) -> None:
    found, why = matched(rows, collectives_among(EVENTS), GROUPS)
    assert set(found) == {None} and why is not None and said in why


def test_another_order_within_a_group_is_told() -> None:
    kernels = [Ran("all_gather", "1", 0.0, 1.0, 1.0), Ran("reduce_scatter", "1", 2.0, 3.0, 1.0)]
    found, why = matched([row("reduce_scatter", "0,1"), row("all_gather", "0,1")], kernels, GROUPS)
    assert found == [None, None] and why is not None and "another order" in why


STEP = [row("all_gather", "0,1"), row("all_reduce", "0,2"), row("reduce_scatter", "0,1"), row("all_reduce", "0,2")]


def test_a_profiled_step_has_the_devices_times_and_the_second_methods_bytes() -> None:
    step = step_of_events(EVENTS, ["forward", "backward"], 0.5, STEP, GROUPS)
    assert step.reason is None
    assert step.traced.start_s == pytest.approx(0.0) and step.traced.ends_s == pytest.approx([170e-6, 220e-6])
    first = step.traced.rows[0]
    assert (first.issued_s, first.completed_s, first.exposed_s) == pytest.approx((50e-6, 150e-6, 40e-6))
    # Four floats in, of which a gather makes eight: 32 bytes, where the row says 16 as all the others do.
    assert step.differences == ["all_gather over ranks 0,1 of 16 B; its kernel moved 32 B"]


def test_phases_that_the_device_did_not_run_leave_the_rows_without_times() -> None:
    step = step_of_events(EVENTS, ["forward", "backward", "optimizer"], 0.5, STEP, GROUPS)
    assert step.reason is not None and "optimizer" in step.reason
    assert [one.issued_s for one in step.traced.rows] == [None] * 4 and step.traced.ends_s == []
