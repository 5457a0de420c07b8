"""Which calls a device's kernels were launched for, on events in the shapes that real traces have (times in us).

Batches of messages: pytorch/pytorch issue 194693, kernels of coalesced gathers: mlcommons/chakra issue 178.
"""

from typing import Any

import pytest
from test_kernels import AUTOGRAD, COMPUTE, GROUPS, MAIN, NCCL, Event, event, kernel, launched, nccl, row, told

from distbench.observe.module_attribution import Communication
from distbench.observe.profiler_kernels import (
    UNNAMED,
    HostCalls,
    Ran,
    collectives_among,
    in_no_phase,
    is_on_device,
    matched,
    phases_among,
    step_of_events,
)

SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def call(kind: str, at: float, number: int, group: str = "1", dur: float = 4, tid: int = MAIN, **args: object) -> Event:
    return event("cpu_op", "record_param_comms", at, dur, tid, **{"External id": number}, **told(kind, group), **args)


def message(kind: str, numel: int, peer: int, at: float, number: int) -> Event:
    """As torch 2.13 writes them: who is at the other end instead of this rank."""
    other = {"send": "Dst Rank", "recv": "Src Rank"}[kind]
    return call(kind, at, number) | {"args": {**told(kind, "1"), "In msg nelems": numel, other: peer}}


def batch(first: int, at: float, *messages: Event) -> list[Event]:
    """Messages that are launched together when the last one was called: by one kernel that says nothing."""
    return [
        *messages,
        launched(first, at, MAIN, "cudaLaunchKernelExC"),
        kernel(SEND_RECV, at + 10, 30, NCCL, correlation=first),
    ]


def pipeline_row(kind: str, numel: int) -> Communication:
    return Communication("forward", "pp", kind, "c10d.send", "pp", 2, "f32", numel * 4, "", True, "", None, "0,1")


def kinds(result: list[Ran]) -> list[str]:
    return [ran.kind for ran in result]


BATCHES = [
    *batch(1, 20, message("recv", 8, 1, 5, 101), message("send", 2, 0, 10, 102)),
    *batch(2, 60, message("send", 16, 0, 50, 103)),
]


def test_messages_of_a_batch_are_those_called_before_its_kernel() -> None:
    result = collectives_among(BATCHES)
    assert [(ran.kind, ran.payload_bytes, round(ran.begun_s * 1e6)) for ran in result] == [
        ("recv", 32, 30),
        ("send", 8, 30),
        ("send", 64, 70),
    ]
    assert [ran.exposed_s * 1e6 for ran in result] == pytest.approx([15, 15, 30]), "no second is counted twice"


def test_a_pipelines_rows_have_their_batches_times() -> None:
    rows = [pipeline_row("recv", 8), pipeline_row("send", 2), row("all_gather", "0,1"), pipeline_row("send", 16)]
    gather = [
        call("_allgather_base", 100, 7),
        launched(9, 101, MAIN),
        nccl("_allgather_base", "1", 110, 5, correlation=9),
    ]
    result, why = matched(rows, collectives_among([*BATCHES, *gather]), GROUPS)
    assert why is None
    assert [ran and round(ran.begun_s * 1e6) for ran in result] == [30, 30, 110, 70]


def test_messages_that_are_not_told_leave_the_others_their_times() -> None:
    """A kernel of another profiler that tells of no message: the gather still has its times, and the rest is said."""
    host = [event("user_annotation", "distbench:forward", 0, 90, MAIN)]
    silent = [one for one in BATCHES if one["cat"] != "cpu_op"]
    gather = [launched(9, 80, MAIN), nccl("_allgather_base", "1", 110, 5, correlation=9)]
    rows = [pipeline_row("recv", 8), row("all_gather", "0,1")]
    step = step_of_events([*host, *silent, *gather], ["forward"], 0.1, rows, GROUPS)
    assert step.reason is None
    assert [one.completed_s is None for one in step.traced.rows] == [True, False]
    assert "1 messages have no times, because the profiler's trace has no kernel for them" in step.differences


def test_gathers_that_torch_coalesces_have_the_kernel_that_follows() -> None:
    calls = [call("_allgather_base", 5, 11), call("_allgather_base", 15, 12)]
    one = [launched(3, 25, MAIN), kernel("ncclDevKernel_AllGather_RING_LL", 40, 20, NCCL, correlation=3)]
    assert [(ran.kind, ran.group) for ran in collectives_among([*calls, *one])] == [("all_gather", "1")] * 2


def test_a_batch_takes_no_call_that_has_a_kernel_nor_one_of_another_group() -> None:
    earlier = [call("allreduce", 1, 31, "2"), launched(8, 2, MAIN), nccl("allreduce", "2", 3, 1, correlation=8)]
    earlier[-1]["args"]["External id"] = 31
    of_hosts = call("allgather", 4, 32, "3")  # on the host alone: it never has a kernel
    waits = call("wait", 15, 33)
    result = collectives_among([*earlier, of_hosts, *BATCHES[:2], waits, *BATCHES[2:4]])
    assert kinds(result) == ["all_reduce", "recv", "send"]


@pytest.mark.parametrize("second", ["ncclDevKernel_SendRecv(again)", "void checkForNaN<float>(float*, unsigned long)"])
def test_kernels_that_bear_one_calls_number_are_one_collective(second: str) -> None:
    """NCCL splits what is large; with TORCH_NCCL_NAN_CHECK a kernel that looks for them has the facts as well."""
    two = [
        nccl("all_to_allv", "1", 100, 10, correlation=1, **{"External id": 40}),
        kernel(second, 120, 30, NCCL, correlation=2, **{"External id": 40}, **told("all_to_allv", "1")),
        kernel("gemm", 140, 40, COMPUTE, correlation=3),
    ]
    (result,) = collectives_among(two)
    assert (result.kind, round(result.begun_s * 1e6), round(result.ended_s * 1e6)) == ("all_to_all", 100, 150)
    assert result.exposed_s * 1e6 == pytest.approx(30), "10 of the first, 20 of the second; none of what lies between"
    # Without numbers each is its own: nobody says that they belong together.
    bare = [one | {"args": {k: v for k, v in one["args"].items() if k != "External id"}} for one in two]
    assert len(collectives_among(bare)) == 2


def test_a_batch_that_is_split_is_one_too() -> None:
    more = [launched(5, 21, MAIN), kernel(SEND_RECV, 60, 10, NCCL, correlation=5)]
    result = collectives_among([*BATCHES[:4], *more])
    assert [(ran.kind, round(ran.ended_s * 1e6)) for ran in result] == [("recv", 70), ("send", 70)]


def test_a_call_within_a_call_that_has_ended_is_not_the_kernels() -> None:
    """A gather of uneven parts is made of broadcasts, and launched by what made them."""
    calls = [call("allgather", 0, 50, dur=40), call("_broadcast_oop", 5, 51), call("_broadcast_oop", 15, 52)]
    one = [launched(3, 30, MAIN), kernel("ncclDevKernel_Broadcast_RING_LL", 45, 20, NCCL, correlation=3)]
    assert kinds(collectives_among([*calls, *one])) == ["all_gather"]


def test_a_barrier_of_the_model_takes_nobodys_times() -> None:
    barrier = [launched(9, 12, MAIN), nccl("barrier", "1", 20, 5, correlation=9)]
    gather = [launched(8, 13, MAIN), nccl("_allgather_base", "1", 30, 5, correlation=8)]
    result, why = matched([row("all_gather", "0,1")], collectives_among([*barrier, *gather]), GROUPS)
    assert why is None and result[0] is not None and round(result[0].begun_s * 1e6) == 30


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [("fp8", "Float8_e4m3fn", 1), ("bf16", "BFloat16", 2), ("complex", "ComplexFloat", 8), ("unknown", "QInt8", None)],
)
def test_bytes_are_counted_for_every_dtype_that_is_known(name: str, dtype: str, size: int | None) -> None:
    one = nccl("allreduce", "1", 0, 1)
    one["args"]["dtype"] = dtype
    several = nccl("allreduce", "1", 5, 1) | {"args": {**told("allreduce", "1"), "In msg nelems": "[4, 4]"}}
    result, of_several = collectives_among([one, several])
    assert of_several.payload_bytes is None, "a vendor's own way to say it"
    assert result.payload_bytes == (None if size is None else 4 * size), name


@pytest.mark.parametrize(
    ("host", "device"),
    [
        ("cuda_driver", "kernel"),
        ("xpu_runtime", "gpu_memcpy"),
        ("xpu_driver", "kernel"),
        ("hpu_op", "kernel"),
        ("mtia_runtime", "mtia_ccp_events"),
        ("privateuse1_runtime", "kernel"),
        ("mlu_runtime", "mlu_memcpy"),  # Cambricon's and Enflame's kinetos
        ("gcu_runtime", "GCU_MEMSET"),
    ],
)
def test_phases_are_found_by_every_vendors_categories(host: str, device: str) -> None:
    events: list[dict[str, Any]] = [
        event("user_annotation", "distbench:backward", 0, 20, MAIN),
        launched(1, 10, AUTOGRAD, "a launch", host),
        kernel("work", 30, 5, cat=device, correlation=1),
    ]
    assert [(one.name, round(one.begun_s * 1e6)) for one in phases_among(events)] == [("backward", 30)]


@pytest.mark.parametrize(
    "cat", ["gpu_user_annotation", "cuda_sync", "cuda_event", "overhead", "Trace", "cpu_op", "xpu_sync"]
)
def test_what_runs_nothing_on_a_device_is_no_work(cat: str) -> None:
    assert not is_on_device(kernel("x", 0, 1, cat=cat))


def test_old_names_and_mangled_ones_are_communication() -> None:
    names = ["_Z41ncclDevKernel_AllReduce_Sum_bf16_RING_LL24ncclDevKernelArgsStorageILm4096EE", "mcclKernel_AllReduce"]
    names += [
        "void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>",
        "vllm::cross_device_reduce_1stage<half>",
    ]
    assert kinds(collectives_among([kernel(name, 0, 1) for name in names])) == [UNNAMED] * 4


def test_calls_without_numbers_are_not_one_call() -> None:
    """A kernel that tells what it is belongs to the call of that name that was open, where neither bears a number."""
    calls = [call("_allgather_base", at, 0) for at in (0, 20)]
    for one in calls:
        del one["args"]["External id"]
    kernels = [launched(1, 2, MAIN), launched(2, 22, MAIN)]
    kernels += [nccl("_allgather_base", "1", 30 * number, 10, correlation=number) for number in (1, 2)]
    result = collectives_among([*calls, *kernels])
    assert [(ran.kind, round(ran.begun_s * 1e6), round(ran.issued_s * 1e6)) for ran in result] == [
        ("all_gather", 30, 0),
        ("all_gather", 60, 20),
    ]


@pytest.mark.parametrize("zero", ["correlation", "External id"])
def test_a_number_of_0_is_none(zero: str) -> None:
    """Graphs' memory nodes and some vendors' runtimes have it: it would put all of them into one phase."""
    host = [
        event("user_annotation", "distbench:forward", 0, 40, MAIN),
        event("user_annotation", "distbench:backward", 40, 60, MAIN),
        event("cuda_runtime", "cudaMallocAsync", 1, 1, MAIN, **{zero: 0}),
        launched(3, 50, AUTOGRAD),
    ]
    device = [kernel("a", 60, 10, correlation=3), kernel("b", 80, 10, **{zero: 0})]
    launches = HostCalls([*host, *device])
    assert [round(one.begun_s * 1e6) for one in phases_among([*host, *device])] == [60, 60]
    assert in_no_phase([*host, *device], launches) == (1, 0, 2)


def test_flows_numbered_by_themselves_are_no_calls() -> None:
    host = [event("user_annotation", f"distbench:{name}", at, 40, MAIN) for name, at in (("a", 0), ("b", 40))]
    flow = {"cat": "ac2g", "name": "ac2g", "id": 5}
    ends = [{**flow, "ph": "s", "pid": 1, "tid": MAIN, "ts": 50}, {**flow, "ph": "f", "pid": 0, "tid": 7, "ts": 90}]
    result = phases_among([*host, launched(5, 2, MAIN), *ends, kernel("k", 90, 10), kernel("k", 70, 5, correlation=5)])
    assert [(one.name, round(one.begun_s * 1e6)) for one in result] == [("a", 70), ("b", 90)]


@pytest.mark.parametrize("cat", ["Kernel", "xpu_kernel", "mlu_kernel", "GCU_KERNEL"])
def test_communication_is_known_in_every_vendors_category(cat: str) -> None:
    """As compute it would hide what runs beside it."""
    other = kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 40, 200, 21, cat=cat)
    result = collectives_among([nccl("allreduce", "1", 50, 100), other])
    assert {ran.kind: round(ran.exposed_s * 1e6) for ran in result} == {"all_reduce": 100, UNNAMED: 200}


def test_what_copy_engines_move_is_the_calls() -> None:
    """NCCL over symmetric memory gathers by copies, to all peers at once: one call, no second of it counted twice."""
    gather = [call("_allgather_base", 0, 61), launched(1, 1, MAIN, "cudaMemcpyAsync")]
    gather += [
        kernel("Memcpy PtoP (Device -> Device)", at, 30, stream, "gpu_memcpy", correlation=1, **{"External id": 61})
        for stream, at in ((31, 10), (32, 10), (33, 20))
    ]
    upload = kernel("Memcpy HtoD (Pinned -> Device)", 60, 5, 34, "gpu_memcpy", correlation=2, **{"External id": 62})
    reduced = [call("allreduce", 50, 62), launched(2, 51, MAIN), launched(3, 52, MAIN), upload]
    reduced.append(nccl("allreduce", "1", 70, 10, correlation=3, **{"External id": 62}))
    result = collectives_among([*gather, *reduced, kernel("gemm", 0, 15)])
    assert [(one.kind, round(one.begun_s * 1e6), round(one.ended_s * 1e6)) for one in result] == [
        ("all_gather", 10, 50),
        ("all_reduce", 70, 80),
    ]
    assert result[0].exposed_s * 1e6 == pytest.approx(35)


def test_what_a_graph_launches_is_of_the_phase_that_launched_it() -> None:
    """All kernels of a CUDA graph bear the number of cudaGraphLaunch; its collectives were called when it was captured,
    so that nobody tells what they are."""
    host = [
        event("user_annotation", "distbench:forward", 0, 40, MAIN),
        event("user_annotation", "distbench:backward", 40, 60, MAIN),
        launched(9, 50, MAIN, "cudaGraphLaunch"),
        launched(8, 10, MAIN),
    ]
    device = [kernel("gemm", 20, 10, correlation=8)]
    device += [kernel("gemm", at, 10, correlation=9, **{"graph id": 3, "graph node id": at}) for at in (100, 110, 140)]
    device.append(kernel("ncclDevKernel_AllGather_RING_LL", 120, 20, NCCL, correlation=9, **{"graph node id": 9}))
    step = step_of_events([*host, *device], ["forward", "backward"], 0.1, [row("all_gather", "0,1")], GROUPS)
    assert step.reason is not None and step.reason.endswith("1 kernels communicate without a recorded collective")
    assert [round(one.ended_s * 1e6) for one in phases_among([*host, *device])] == [30, 150]
    assert step.traced.ends_s == pytest.approx([30e-6, 150e-6])
