"""Collectives among a profiler's kernels, and phases of a step: a trace in the shape that kineto writes, times in us.

The host goes through forward (thread 100), backward (whose work is launched by autograd's thread 200) and the
optimizer. On the device kineto keeps the innermost annotation alone, one a stream, and none of autograd's thread.
"""

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distbench.observe import profiler_kernels
from distbench.observe.module_attribution import Communication
from distbench.observe.profiler_kernels import (
    UNNAMED,
    HostCalls,
    Ran,
    collectives_among,
    communicates,
    events_in,
    matched,
    phases_among,
    step_of_events,
)
from distbench.spec.covered_time import Cover

Event = dict[str, Any]
MAIN, AUTOGRAD, COMPUTE, NCCL = 100, 200, 7, 20


def event(cat: str, name: str, ts: float, dur: float, tid: int, pid: int = 1, **args: object) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, stream: int = COMPUTE, cat: str = "kernel", **args: object) -> Event:
    return event(cat, name, ts, dur, stream, 0, device=0, context=1, stream=stream, **args)


def told(collective: str, group: str) -> dict[str, object]:
    sizes = {"In msg nelems": 4, "Out msg nelems": 8, "Group size": 2, "dtype": "Float"}
    return {"Collective name": collective, "Process Group Name": group, **sizes}


def nccl(collective: str, group: str, ts: float, dur: float, **args: object) -> Event:
    return kernel("ncclDevKernel_WhateverItIsCalledNow", ts, dur, NCCL, **told(collective, group), **args)


def launched(number: int, at: float, thread: int, call: str = "cudaLaunchKernel", cat: str = "cuda_runtime") -> Event:
    return event(cat, call, at, 5, thread, cbid=211, correlation=number)


HOST = [
    event("user_annotation", "distbench:forward", 0, 40, MAIN, **{"External id": 1}),
    event("user_annotation", "FSDP::pre_forward", 2, 10, MAIN),
    event("user_annotation", "distbench:backward", 40, 60, MAIN),
    event("user_annotation", "FSDP::pre_backward (layers.0)", 45, 10, AUTOGRAD),
    event("user_annotation", "distbench:optimizer", 100, 30, MAIN),
    event("user_annotation", "Optimizer.step#AdamW.step", 101, 28, MAIN),
    event("cpu_op", "record_param_comms", 3, 9, MAIN, **told("_allgather_base", "1")),
    launched(1, 5, MAIN, "cudaLaunchKernelExC"),
    launched(2, 20, MAIN),
    launched(3, 50, AUTOGRAD, "cuLaunchKernelEx", "cuda_driver"),
    launched(4, 60, AUTOGRAD, "cudaLaunchKernelExC"),
    launched(5, 70, AUTOGRAD, "cudaMemcpyAsync"),
    launched(6, 110, MAIN),
    launched(7, 112, MAIN, "cudaLaunchKernelExC"),
]
EVENTS = [
    *HOST,
    nccl("_allgather_base", "1", 50, 100, correlation=1),  # 50 to 150; gemm covers 50 to 120
    kernel("gemm", 20, 100, correlation=2),
    kernel("gemm_backward", 200, 400, correlation=3),
    nccl("_reduce_scatter_base", "1", 590, 30, correlation=4),  # 590 to 620; gemm covers to 600, the copy from 615
    kernel("Memcpy DtoD", 615, 20, cat="gpu_memcpy", correlation=5),
    kernel("multi_tensor_adam", 640, 60, correlation=6),
    nccl("allreduce", "2", 710, 20, correlation=7),  # nothing beside it
    # What kineto draws on the device: shadowed by those inside, one a stream.
    event("gpu_user_annotation", "distbench:forward", 20, 2, COMPUTE, 0),
    event("gpu_user_annotation", "FSDP::pre_forward", 50, 100, NCCL, 0),
    event("gpu_user_annotation", "Optimizer.step#AdamW.step", 640, 60, COMPUTE, 0),
    {"ph": "s", "id": 1, "pid": 1, "tid": MAIN, "ts": 5, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 1, "pid": 0, "tid": NCCL, "ts": 50, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
]
GROUPS = {"1": "0,1", "2": "0,2", "3": "0"}
PHASES = ["forward", "backward", "optimizer"]


def row(kind: str, group: str, group_size: int = 2) -> Communication:
    return Communication("forward", "tp", kind, "op", "tp", group_size, "f32", 16, "", True, "", None, group)


STEP = [row("all_gather", "0,1"), row("reduce_scatter", "0,1"), row("all_reduce", "0,2")]


def without(events: list[Event], *names: str) -> list[Event]:
    """The same events, those arguments left out of kernels."""
    kept = []
    for one in events:
        args = {name: value for name, value in one.get("args", {}).items() if name not in names}
        kept.append(one | {"args": args} if one.get("cat") in ("kernel", "gpu_memcpy") else one)
    return kept


def in_us(events: list[Event]) -> list[tuple[str, int, int]]:
    return [(one.name, round(one.begun_s * 1e6), round(one.ended_s * 1e6)) for one in phases_among(events)]


def test_phases_are_of_what_the_host_launched_in_them_on_any_thread() -> None:
    assert in_us(EVENTS) == [("forward", 20, 150), ("backward", 200, 635), ("optimizer", 640, 730)]


def test_a_launch_is_known_by_its_flow_or_its_operator_where_there_is_no_correlation() -> None:
    calls = [one for one in HOST if one["cat"] not in ("cuda_runtime", "cuda_driver")]
    flow = {"cat": "ac2g", "name": "ac2g", "id": 9}
    by_flow = [
        {**flow, "ph": "s", "pid": 1, "tid": AUTOGRAD, "ts": 50},
        {**flow, "ph": "f", "pid": 0, "tid": 7, "ts": 200},
    ]
    by_operator = [event("cpu_op", "aten::mm", 60, 9, AUTOGRAD, **{"External id": 33})]
    by_number_of_call = [event("cuda_runtime", "hipLaunchKernel", 70, 2, AUTOGRAD, **{"External id": 34})]
    device = [kernel("a", 200, 10), *(kernel("b", at, 10, **{"External id": at // 10 + 3}) for at in (300, 310))]
    assert in_us([*calls, *by_flow, *by_operator, *by_number_of_call, *device])[1] == ("backward", 200, 320)


def test_hips_launches_count_and_the_runtimes_call_before_the_drivers() -> None:
    both = [launched(3, 99, AUTOGRAD, "hipLaunchKernel"), launched(3, 101, AUTOGRAD, "hipModuleLaunch", "cuda_driver")]
    assert in_us([*HOST[:6], *both, kernel("gemm", 400, 10, correlation=3)])[1] == ("backward", 400, 410)


def test_events_may_come_in_any_order_and_last_no_time() -> None:
    """A kernel whose end the device never told lasts less than nothing; it hides nobody, and ends where it began."""
    lost = [kernel("lost", 100, -40, 9, correlation=2), kernel("empty", 110, 0, 9, correlation=2)]
    there, back = in_us([*EVENTS, *lost]), in_us([*lost, *reversed(EVENTS)])
    assert there == back == in_us(EVENTS)
    result = collectives_among([*lost, *reversed(EVENTS)])
    assert [ran.exposed_s * 1e6 for ran in result] == pytest.approx([30, 15, 20])


def test_what_was_launched_in_no_phase_is_said() -> None:
    """By a thread of its own that goes on when the step has ended."""
    late = [launched(99, 135, AUTOGRAD), kernel("late", 900, 50, correlation=99)]
    step = step_of_events([*EVENTS, *late], PHASES, 0.5, STEP, GROUPS)
    assert step.traced.ends_s[-1] == pytest.approx(730e-6)
    assert (
        step.differences[-1]
        == "1 of 8 kernels and copies were launched before or after the step, and belong to no phase"
    )


def test_a_phase_that_launched_nothing_ends_where_the_one_before_it_did() -> None:
    events = [one for one in EVENTS if one.get("args", {}).get("correlation") not in (6, 7)]
    assert in_us(events)[2] == ("optimizer", 635, 635)


def test_a_collective_is_known_by_its_metadata_and_exposed_where_nothing_else_runs() -> None:
    result = collectives_among(EVENTS)
    assert [(ran.kind, ran.group) for ran in result] == [
        ("all_gather", "1"),
        ("reduce_scatter", "1"),
        ("all_reduce", "2"),
    ]
    assert [ran.exposed_s * 1e6 for ran in result] == pytest.approx([30, 15, 20])
    assert [(ran.ended_s - ran.begun_s) * 1e6 for ran in result] == pytest.approx([100, 30, 20])


def test_a_kernel_without_metadata_has_its_calls() -> None:
    result = collectives_among(without(EVENTS, *told("", "")))
    assert [(ran.kind, ran.group) for ran in result] == [("all_gather", "1"), (UNNAMED, ""), (UNNAMED, "")]


def test_a_kernel_that_nobody_tells_of_is_communication_and_hides_no_other() -> None:
    """As compute it would hide all of the gather: 50 to 150 on the same link."""
    other = kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 40, 200, 21)
    result = collectives_among([*EVENTS, other])
    assert {ran.kind: ran.exposed_s * 1e6 for ran in result}["all_gather"] == pytest.approx(30)
    step = step_of_events([*EVENTS, other], PHASES, 0.5, STEP, GROUPS)
    assert step.reason is None
    assert step.differences[1:] == [
        "1 kernels communicate without a recorded collective, and do not reduce exposed times",
        "1 of 8 kernels and copies have no launch in the trace, and belong to no phase",
    ]


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWork*)", True),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", True),
        ("void ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", True),
        ("oneccl_allreduce_small", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", False),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", False),
    ],
)
def test_kernels_of_communication_libraries_are_known_by_name(name: str, does: bool) -> None:
    assert communicates(name) == does


def test_how_much_is_hidden_is_bisected() -> None:
    compute = [(at, at + 0.5) for at in range(8000)]
    spans = [(20.0 * at, 20.0 * at + 19.75) for at in range(400)]
    began = time.process_time()
    one_by_one = [
        sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in compute) for start, stop in spans[:40]
    ]
    linear_s, began = time.process_time() - began, time.process_time()
    cover = Cover(compute)
    result = [cover.seconds(span) for span in spans]
    assert time.process_time() - began < linear_s  # of a tenth of the spans, each held against every interval
    assert result[:40] == pytest.approx(one_by_one)
    assert result == pytest.approx([10.0] * 400)
    assert cover.seconds((0.25, 1.25)) == 0.5 and cover.seconds((-5, 0)) == 0 == Cover([]).seconds((0, 1))


@pytest.mark.long
def test_a_large_trace_is_read_piece_by_piece(tmp_path: Path) -> None:
    file, alive = tmp_path / "trace.json", []
    body = ",\n  ".join(map(json.dumps, EVENTS * 1000))
    file.write_text(f'{{"schemaVersion": 1, "traceEvents": [\n  {body}\n  ], "traceName": "[x"}}')
    result = list(events_in(file, lambda: alive.append(1)))
    assert result[: len(EVENTS)] == EVENTS and len(result) == len(EVENTS) * 1000
    assert len(alive) == len(result) // 20_000
    file.write_text('{"traceEvents": []}')
    assert list(events_in(file)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schemaVersion": 1}', "no list of events"),
        ("", "no list of events"),
        (
            '{"traceEvents": [\n  {\n    "ph": "X", "name": "a"\n  },\n  {\n    "ph": "X", "na',
            "the trace is incomplete",
        ),
        ('{"traceEvents": [\n  {\n    "ph": "X", "name": "a"\n  },', "the trace is incomplete"),
        ('{"traceEvents": [\n  {\n    "ph": X, "name": "a"\n  }\n]}', "event 0 is not JSON"),
    ],
)
def test_a_trace_that_is_cut_or_no_json_is_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(events_in(tmp_path / "trace.json"))


def test_what_kineto_writes_as_no_json_is_read(tmp_path: Path) -> None:
    """It escapes no quotation marks in names, and prints infinity as C++ does."""
    one = """
  {
    "ph": "X", "cat": "%s", "name": "%s", "pid": 0, "tid": 7,
    "ts": 20.500, "dur": 3.250,
    "args": {
      "External id": 12,"device": 0, "correlation": 5,
      "blocks per SM": %s,
      "grid": [1, 1, 1]
    }
  },"""
    names = ['say "hi", \\"twice\\"', "plain inf: nan", "K\xe4fer"]
    numbers = ["inf", "-nan", "0.5"]
    body = "".join(
        one % ("kernel", name.replace("\\", "/"), number) for name, number in zip(names, numbers, strict=True)
    )
    (tmp_path / "trace.json").write_bytes(('{"traceEvents": [' + body + "\n  {}\n  ]}").encode("latin-1"))
    *events, last = events_in(tmp_path / "trace.json")
    assert [one["args"]["correlation"] for one in events] == [5, 5, 5] and last == {}
    assert events[0]["name"].startswith("say 'hi'") and events[1]["name"] == "plain inf: nan"
    assert [one["args"]["blocks per SM"] for one in events] == [None, None, 0.5]


def test_a_profiled_step_begins_on_an_idle_device_and_says_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    class Profile(contextlib.nullcontext[Any]):
        def __init__(self, **_: object) -> None:
            order.append("profile")
            super().__init__(self)

        def export_chrome_trace(self, file: str) -> None:
            Path(file).write_text('{"traceEvents": [')

    class Step(SimpleNamespace):
        def __call__(self, stamp: Any) -> None:
            order.append("step")

    for name, stand_in in (
        ("profile", Profile),
        ("_begin_profiling", lambda device: None),
        ("synchronize", lambda device: order.append("idle")),
        ("dist", SimpleNamespace(barrier=lambda group: None)),
    ):
        monkeypatch.setattr(profiler_kernels, name, stand_in)
    context: Any = SimpleNamespace(device=torch.device("cpu"), control=None)
    result = profiler_kernels.profiled_step(Step(phases=["forward"]), context, STEP)  # type: ignore[arg-type]
    assert order == ["idle", "profile", "step", "idle"]
    assert (
        result.reason is not None
        and "the trace is incomplete; check that the disk of temporary files is not full" in result.reason
    )
    assert [one.issued_s for one in result.traced.rows] == [None] * 3 and result.traced.ends_s == []


def test_the_nth_collective_of_a_group_is_its_nth_kernel() -> None:
    alone = row("all_gather", "0", 1)  # alone in its group: NCCL may run a copy instead
    result, why = matched(
        [STEP[2], STEP[0], alone, STEP[1]], collectives_among([nccl("_allgather_base", "3", 300, 1), *EVENTS]), GROUPS
    )
    assert why is None
    assert [None if ran is None else round(ran.begun_s * 1e6) for ran in result] == [710, 50, None, 590]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("all_gather", "0,1")], "only among kernels reduce_scatter over 0,1: 1; all_reduce over 0,2: 1"),
        ([row("all_to_all", "0,1")], "no kernel of all_to_all over 0,1: 1"),
    ],
)
def test_kernels_that_are_not_the_collectives_are_told_and_not_guessed(rows: list[Communication], message: str) -> None:
    result, why = matched(rows, collectives_among(EVENTS), GROUPS)
    assert set(result) == {None} and why is not None
    assert all(part in why for part in message.split("; "))
    _, why = matched(STEP, collectives_among(without(EVENTS, *told("", ""))), GROUPS)
    assert why is not None and why.endswith("2 kernels communicate without a recorded collective")


def test_another_order_within_a_group_is_told() -> None:
    kernels = [Ran("all_gather", "1", 0.0, 1.0, 1.0), Ran("reduce_scatter", "1", 2.0, 3.0, 1.0)]
    result, why = matched([row("reduce_scatter", "0,1"), row("all_gather", "0,1")], kernels, GROUPS)
    assert result == [None, None] and why is not None and "another order" in why


def test_a_profiled_step_has_the_devices_times_and_the_second_methods_bytes() -> None:
    step = step_of_events(EVENTS, PHASES, 0.5, STEP, GROUPS)
    assert step.reason is None
    assert step.traced.start_s == pytest.approx(20e-6) and step.traced.ends_s == pytest.approx([150e-6, 635e-6, 730e-6])
    first = step.traced.rows[0]
    assert (first.issued_s, first.completed_s, first.exposed_s) == pytest.approx((50e-6, 150e-6, 30e-6))
    # Four floats in, of which a gather makes eight: 32 bytes, where the row says 16 as all the others do.
    assert step.differences == ["all_gather over ranks 0,1 has 16 B, but its kernel moved 32 B"]


def test_phases_that_the_host_did_not_go_through_leave_the_rows_without_times() -> None:
    step = step_of_events(EVENTS, [*PHASES, "more"], 0.5, STEP, GROUPS)
    assert step.reason is not None and "more" in step.reason
    assert [one.issued_s for one in step.traced.rows] == [None] * 3 and step.traced.ends_s == []
    nothing = step_of_events(HOST, PHASES, 0.5, [], GROUPS)
    assert nothing.reason == f"the device ran phases [] instead of {PHASES}"


def test_launches_are_those_of_the_trace() -> None:
    launches = HostCalls(EVENTS)
    launch = launches.of(EVENTS[len(HOST) + 2])
    assert launch is not None and (round(launch.at_s * 1e6), launch.thread) == (50, AUTOGRAD)
    assert launches.of(kernel("of another step", 0, 1, correlation=77)) is None
