"""The device seam on an accelerator that is not here: a made-up module stands where torch has its own."""

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Children

from distbench.launch.watch_ranks import cause_of
from distbench.ranks import device as seam
from distbench.ranks.hosts import require_own_devices
from distbench.records import machine
from distbench.records.machine import accelerator_here, device_count, num_visible
from distbench.spec import UserError
from distbench.spec.devices import backend_for, device_of
from distbench.worker import rank_launcher


class Event:
    moments_ms: Iterator[float]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = next(Event.moments_ms)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


class Xpu:
    """As much of torch.xpu as the seam uses; `done` is what it was asked to do."""

    Event = Event

    def __init__(self) -> None:
        self.done: list[str] = []
        self.num_devices = 2

    def __getattr__(self, name: str) -> Any:
        def act(*device: torch.device) -> int:
            self.done.append(" ".join([name, *map(str, device)]))
            return len(self.done)

        return act

    def is_available(self) -> bool:
        return self.num_devices > 0

    def device_count(self) -> int:
        return self.num_devices

    def get_device_name(self, device: torch.device) -> str:
        return "an accelerator"


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Xpu:
    module = Xpu()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_another_accelerator_is_chosen_waited_for_and_read(xpu: Xpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = seam.select_device("xpu")
    assert str(device) == "xpu:1"
    seam.synchronize(device)
    assert xpu.done == ["set_device xpu:1", "synchronize xpu:1"]
    assert [activity.name for activity in seam.profiler_activities(device)] == ["CPU", "XPU"]
    assert seam.profiler_activities(torch.device("privateuseone"))[1].name == "PrivateUse1"
    facts = seam.device_facts(device)
    assert (facts["device"], facts["device_name"], facts["num_devices"]) == ("xpu", "an accelerator", 2)
    assert facts["nccl"] is None


def test_a_case_begins_with_an_empty_allocator(xpu: Xpu) -> None:
    left = seam.empty_allocator(torch.device("xpu", 1))
    assert xpu.done == ["synchronize xpu:1", "empty_cache", "reset_peak_memory_stats xpu:1", "memory_allocated xpu:1"]
    assert left == 4, "what is still held is the case's baseline"


def test_what_a_case_before_left_in_a_cycle_is_collected(xpu: Xpu) -> None:
    class Step:
        def __init__(self) -> None:
            self.itself = self

    gone = weakref.ref(Step())
    assert gone() is not None
    seam.empty_allocator(torch.device("xpu", 0))
    assert gone() is None


def test_the_peak_is_the_fullest_phases(xpu: Xpu, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, reserved = iter([10, 30, 20]), iter([50, 40, 45, 45])
    monkeypatch.setattr(xpu, "max_memory_allocated", lambda device: next(allocated), raising=False)
    monkeypatch.setattr(xpu, "max_memory_reserved", lambda device: next(reserved), raising=False)
    phases = ("forward", "backward", "optimizer")
    result = seam.allocator_peak(torch.device("xpu", 1), lambda stamp: [stamp() for _ in phases], phases)
    assert result == {"peak_bytes": 30, "peak_reserved_bytes": 50, "peak_phase": "backward"}
    assert xpu.done == ["reset_peak_memory_stats xpu:1"] * 4


def test_moments_are_events_of_the_device(xpu: Xpu) -> None:
    clock = seam.clock_of(torch.device("xpu", 0))
    Event.moments_ms = iter([5.0, 7.0, 12.5])
    for _ in range(3):
        clock.stamp()
    assert not clock.shared_between_ranks
    assert clock.read() == [0.0, 0.002, 0.0075] and clock.read() == []


def test_a_collective_that_never_ends_is_not_waited_for(xpu: Xpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mismatched collectives one stays on the device for good; the launch must go on and say so."""
    Event.moments_ms = iter([0.0, 0.0])
    answers = iter([False, True])
    monkeypatch.setattr(Event, "query", lambda event: next(answers), raising=False)
    assert seam.ends_within(torch.device("xpu", 0), 5.0)
    monkeypatch.setattr(Event, "query", lambda event: False)
    assert not seam.ends_within(torch.device("xpu", 0), 0.02)
    assert seam.ends_within(torch.device("cpu"), 0.0)


def test_a_cpu_asks_no_accelerator(xpu: Xpu) -> None:
    device = seam.select_device("cpu")
    seam.synchronize(device)
    seam.empty_allocator(device)
    assert seam.clock_of(device).shared_between_ranks
    assert seam.device_facts(device)["num_devices"] == 0 and xpu.done == []


def test_one_visible_device_is_number_0_on_every_rank(xpu: Xpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --gpus-per-task=1` shows each rank its own alone."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    xpu.num_devices = 1
    assert str(seam.select_device("xpu")) == "xpu:0"
    xpu.num_devices = 2
    with pytest.raises(UserError, match=r"number 3 on host .* \(LOCAL_RANK\) and may use 2 XPU devices; make one"):
        seam.select_device("xpu")
    xpu.num_devices = 0
    with pytest.raises(UserError, match=r"--device xpu: torch .* finds no XPU device; install torch built for"):
        seam.select_device("xpu")


def test_ranks_that_share_a_device_are_refused() -> None:
    require_own_devices("a", lambda own: [("one", "a"), ("two", "a"), ("one", "b"), ("one", None), ("one", None)])
    with pytest.raises(UserError, match="ranks 0 and 2 use the same device of one; start one rank per device"):
        require_own_devices("a", lambda own: [("one", "a"), ("two", "a"), ("one", "a")])


def test_backends_are_torchs_own_where_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    message = dist.Backend.default_device_backend_map
    monkeypatch.setitem(message, "hpu", "fake")  # as torch has it until the package for it is there
    monkeypatch.setitem(message, "npu", "lccl")
    names = ("cuda", "xpu", "hpu", "npu", "mtia")
    assert [seam.Accelerator(name).backend for name in names] == ["nccl", "xccl", "hccl", "lccl", "mtia"]
    assert [backend_for(name) for name in ("cpu", "cuda", "xpu")] == ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,xpu:xccl"]
    assert backend_for("npu", "lccl") == "cpu:gloo,npu:lccl"
    assert [device_of(backend) for backend in ("gloo", "nccl", "xccl", "other")] == ["cpu", "cuda", "xpu", "cpu"]


def test_rocm_is_told_by_torchs_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    result = seam.Accelerator("cuda")
    assert (result.platform, result.version, result.backend) == ("rocm", "6.4", "nccl")
    assert seam.device_facts(torch.device("cpu"))["hip"] == "6.4"


def test_a_device_that_torch_has_no_module_of_is_a_sentence() -> None:
    assert not seam.Accelerator("hpu").is_available and seam.Accelerator("hpu").num_devices == 0
    with pytest.raises(UserError, match="--device hpu: torch"):
        seam.select_device("hpu")


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("2, 3", 2)])
def test_visible_devices_are_counted_without_torch(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_count("cuda") == count
    assert accelerator_here() == (("cuda", count) if count else ("cpu", 0))


@pytest.mark.parametrize(
    ("visible", "here", "count"),
    [
        ("0,-1,2", 4, 1),  # nothing behind an invalid number is seen
        ("0,9,1", 4, 1),
        ("0,9,1", None, 3),
        ("1,1", 4, 0),
        ("GPU-8932f937,GPU-4f2a", 4, 2),
        ("MIG-4f2a,MIG-77b0", 1, 1),  # a process sees the first part alone, whatever it is shown
        ("MIG-GPU-4f2a/1/0,MIG-GPU-4f2a/2/0", None, 1),
        ("0,,1", 4, 1),
        ("NoDevFiles", 4, 0),  # Slurm's, of a job that asked for none
        ("1,none", 4, 1),
    ],
)
def test_visible_devices_are_counted_as_their_driver_does(visible: str, here: int | None, count: int) -> None:
    assert num_visible(visible, here) == count


LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-84c5e1b3)
"""
PARTS = """\
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736)
  MIG 3g.20gb     Device  1: (UUID: MIG-a28ad590)
"""


@pytest.mark.parametrize(("listed", "count"), [(LISTED, 2), (LISTED + PARTS, 1), ("No devices found.\n", 0)])
def test_a_split_device_is_one(monkeypatch: pytest.MonkeyPatch, listed: str, count: int) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine, "output_of", lambda command: listed)
    assert device_count("cuda") == count


def test_a_tool_that_hangs_in_its_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in the kernel for a broken device cannot be killed: who waits for it waits for ever."""
    waits, done = threading.Event(), []

    class Process:
        def __init__(self, command: object, **how: object) -> None: ...

        def communicate(self, timeout: float) -> tuple[str, str]:
            raise machine.subprocess.TimeoutExpired("nvidia-smi", timeout)

        def kill(self) -> None:
            done.append("kill")

        def wait(self) -> None:
            waits.wait()

    monkeypatch.setattr(machine.subprocess, "Popen", Process)
    assert machine.output_of(["nvidia-smi"], 0.1) is None and done == ["kill"]
    waits.set()


def test_what_is_no_text_is_read_anyway(children: Children) -> None:
    assert machine.output_of(["printf", r"GPU 0: \xff\n"]) == "GPU 0: \ufffd\n"
    assert machine.output_of(["false"]) is None is machine.output_of(["/nowhere/nvidia-smi"])


def test_a_module_that_lacks_a_function_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.mtia has no max_memory_reserved, mem_get_info or get_device_name in 2.13."""

    class Mtia:
        def is_available(self) -> bool:
            return True

        def device_count(self) -> int:
            return 1

        def max_memory_allocated(self, device: torch.device) -> int:
            return 7

        def reset_peak_memory_stats(self, device: torch.device) -> None: ...

    monkeypatch.setattr(torch, "get_device_module", lambda device: Mtia())
    device = torch.device("mtia", 0)
    result = seam.allocator_peak(device, lambda stamp: stamp(), ("forward",))
    assert result == {"peak_bytes": 7, "peak_reserved_bytes": None, "peak_phase": "forward"}
    assert seam.free_bytes(device) == 0 and seam.device_facts(device)["device_name"] == "mtia"
    assert seam.identity(device) is None


def test_devices_are_told_by_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert accelerator_here() == ("cpu", 0)
    for node, number in enumerate(("0", "0", "28851", "28851")):  # two CPUs, two GPUs
        file = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(node) / "gpu_id"
        file.parent.mkdir(parents=True)
        file.write_text(f"{number}\n")
    assert accelerator_here() == ("cuda", 2), "AMD's devices bear CUDA's name in torch"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert accelerator_here() == ("cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert accelerator_here() == ("cpu", 0)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("nearby", "DISTBENCH_NUMA_BINDING=nearby is not a valid binding of ranks; use node, "),
        ("node", "DISTBENCH_NUMA_BINDING=node: torch cannot bind rank 1 near a device ("),
    ],
)
def test_a_rank_that_cannot_be_bound_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    def refuses(*, gpu_index: int, numa_options: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("torch.numa.binding._maybe_apply_numa_binding_to_current_process", refuses)
    monkeypatch.setenv("DISTBENCH_NUMA_BINDING", mode)
    assert not rank_launcher._is_bound(1, tmp_path)
    cause = cause_of(tmp_path, 1)
    assert cause.user_can_fix and cause.message.startswith(message)
    monkeypatch.delenv("DISTBENCH_NUMA_BINDING")
    assert rank_launcher._is_bound(1, tmp_path)
