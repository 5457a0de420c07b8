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
        def act(*device: torch.device) -> int:
            self.done.append(" ".join([name, *map(str, device)]))
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
    assert xpu.done == ["set_device xpu:1", "synchronize xpu:1"]
    assert [activity.name for activity in seam.profiler_activities(device)] == ["CPU", "XPU"]
    facts = seam.device_facts(device)
    assert (facts["device"], facts["device_name"], facts["num_devices"]) == ("xpu", "an accelerator", 2)
    assert facts["nccl"] is None


def test_a_case_begins_with_an_empty_allocator(xpu: Xpu) -> None:
    seam.empty_allocator(torch.device("xpu", 1))
    assert xpu.done == ["synchronize xpu:1", "empty_cache", "reset_peak_memory_stats xpu:1"]


def test_the_peak_is_the_fullest_phases(xpu: Xpu, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, reserved = iter([10, 30, 20]), iter([50, 40, 45, 45])
    monkeypatch.setattr(xpu, "max_memory_allocated", lambda device: next(allocated), raising=False)
    monkeypatch.setattr(xpu, "max_memory_reserved", lambda device: next(reserved), raising=False)
    phases = ("forward", "backward", "optimizer")
    found = seam.allocator_peak(torch.device("xpu", 1), lambda stamp: [stamp() for _ in phases], phases)
    assert found == {"peak_bytes": 30, "peak_reserved_bytes": 50, "peak_phase": "backward"}
    assert xpu.done == ["reset_peak_memory_stats xpu:1"] * 4


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
    seam.empty_allocator(device)
    assert seam.clock_of(device).shared_between_ranks
    assert seam.device_facts(device)["num_devices"] == 0 and xpu.done == []


def test_backends_follow_the_table(xpu: Xpu) -> None:
    assert [backend_for(name) for name in ("cpu", "cuda", "xpu")] == ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,xpu:xccl"]
    assert [device_of(backend) for backend in ("gloo", "nccl", "xccl", "other")] == ["cpu", "cuda", "xpu", "cpu"]


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("2, 3", 2)])
def test_visible_devices_are_counted_without_torch(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_count("cuda") == count
    assert accelerator_here() == (("cuda", count) if count else ("cpu", 0))
