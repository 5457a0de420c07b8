"""The device seam on an accelerator that is not here: a made-up module stands where torch has its own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distbench.runs.machine import accelerator_here, device_count
from distbench.spec.devices import DEVICES, DeviceType, backend_for, device_of
from distbench.worker.rank import device as seam


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

    def __getattr__(self, name: str) -> Any:
        def act(device: torch.device) -> int:
            self.done.append(f"{name} {device}")
            return len(self.done)

        return act

    def device_count(self) -> int:
        return 2

    def get_device_name(self, device: torch.device) -> str:
        return "an accelerator"


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Xpu:
    module = Xpu()
    monkeypatch.setitem(DEVICES, "xpu", DeviceType("xccl"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_another_accelerator_is_chosen_waited_for_and_read(xpu: Xpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = seam.select_device("xpu")
    assert str(device) == "xpu:1"
    seam.synchronize(device)
    memory = seam.PeakMemory(device)
    read = memory.read()
    expected = ["set_device", "synchronize", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"]
    assert xpu.done == [f"{name} xpu:1" for name in expected]
    assert seam.measured_peak(device, read) == (4, "torch's allocator")
    assert [activity.name for activity in seam.profiler_activities(device)] == ["CPU", "XPU"]
    facts = seam.device_facts(device)
    assert (facts["device"], facts["device_name"], facts["num_devices"]) == ("xpu", "an accelerator", 2)
    assert facts["nccl"] is None


def test_moments_are_events_of_the_device(xpu: Xpu) -> None:
    clock = seam.clock_of(torch.device("xpu", 0))
    Event.moments_ms = iter([5.0, 7.0, 12.5])
    for _ in range(3):
        clock.stamp()
    assert not clock.shared_between_ranks
    assert clock.read() == [0.0, 0.002, 0.0075] and clock.read() == []


def test_a_cpu_asks_no_accelerator(xpu: Xpu) -> None:
    device = seam.select_device("cpu")
    seam.synchronize(device)
    memory = seam.PeakMemory(device).read()
    assert seam.clock_of(device).shared_between_ranks and set(memory) == {"peak_growth_bytes"}
    assert seam.measured_peak(device, {"peak_growth_bytes": 8}) == (8, "growth of resident memory")
    assert seam.device_facts(device)["num_devices"] == 0 and xpu.done == []


def test_backends_follow_the_table(xpu: Xpu) -> None:
    assert [backend_for(name) for name in ("cpu", "cuda", "xpu")] == ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,xpu:xccl"]
    assert [device_of(backend) for backend in ("gloo", "nccl", "xccl", "other")] == ["cpu", "cuda", "xpu", "cpu"]


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("2, 3", 2)])
def test_visible_devices_are_counted_without_torch(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_count("cuda") == count
    assert accelerator_here() == (("cuda", count) if count else ("cpu", 0))
