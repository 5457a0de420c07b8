"""All that torch does with a device itself: choose it, wait for it, read its clock and memory, say what it is."""

import gc
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from distbench.spec.devices import ACCELERATORS, DEVICES

MEMINFO = Path("/proc/meminfo")


def select_device(device_type: str) -> torch.device:
    """This rank's device, the current one from now on."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.get_device_module(device).set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Return when the device is idle."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class HostClock:
    """CLOCK_MONOTONIC, which all processes of one host share: moments of different ranks can be compared."""

    shared_between_ranks = True

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._moments: list[float] = []

    def stamp(self) -> None:
        """Mark this moment."""
        self._moments.append(self._now())

    def read(self) -> list[float]:
        """Seconds of every moment since the last read, in order; forgets them."""
        moments, self._moments = self._moments, []
        return moments


class EventClock:
    """Events on the device's current stream. Moments are relative to the first one, so ranks cannot be compared."""

    shared_between_ranks = False

    def __init__(self, device: torch.device) -> None:
        self._make_event = torch.get_device_module(device).Event
        self._events: list[Any] = []

    def stamp(self) -> None:
        """Record an event on the current stream."""
        event = self._make_event(enable_timing=True)
        event.record()
        self._events.append(event)

    def read(self) -> list[float]:
        """Seconds between the first event and each, once all of them have happened; forgets them."""
        events, self._events = self._events, []
        if not events:
            return []
        events[-1].synchronize()
        return [events[0].elapsed_time(event) / 1e3 for event in events]


Clock = HostClock | EventClock


def clock_of(device: torch.device) -> Clock:
    """What samples on this device are read from."""
    return HostClock() if DEVICES[device.type].waits_on_host else EventClock(device)


def empty_allocator(device: torch.device) -> None:
    """Give back all that earlier cases left behind, so that what the next one takes is its own."""
    gc.collect()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)


def allocator_peak(
    device: torch.device, call: Callable[[Callable[[], None]], object], phases: Sequence[str]
) -> dict[str, Any]:
    """What an accelerator's allocator has handed out at the peak of one call, `peak_bytes`, and in which phase.

    `peak_reserved_bytes` is what it has reserved for that, since `empty_allocator`. The call stamps the end of each
    phase; memory is handed out as work is issued, so nothing waits.
    """
    module = torch.get_device_module(device)
    peaks: list[int] = []
    reserved = [module.max_memory_reserved(device)]

    def stamp() -> None:
        peaks.append(module.max_memory_allocated(device))
        reserved.append(module.max_memory_reserved(device))
        module.reset_peak_memory_stats(device)

    module.reset_peak_memory_stats(device)
    call(stamp)
    place = max(range(len(peaks)), key=peaks.__getitem__)
    return {"peak_bytes": peaks[place], "peak_reserved_bytes": max(reserved), "peak_phase": phases[place]}


def free_bytes(device: torch.device) -> int:
    """Memory that this rank could still take, where the ranks of a host share what is free."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    match = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE) if MEMINFO.exists() else None
    return int(match.group(1)) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if match else 0


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Of the generators that a model on this device draws from by default."""
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """What to profile: the host, as kernels' metadata are taken from operators there, and the device."""
    return [ProfilerActivity.CPU, getattr(ProfilerActivity, device.type.upper())]


def device_facts(device: torch.device) -> dict[str, Any]:
    """The header's fields about the device and what drives it; versions of accelerators that torch lacks are None."""
    used = torch.get_device_module(device) if device.type != "cpu" else None
    return {
        **{name: getattr(torch.version, name, None) for name in ACCELERATORS},
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()) if device.type == "cuda" else None,
        "device": device.type,
        "device_name": used.get_device_name(device) if used else None,
        "num_devices": used.device_count() if used else 0,
    }


def accelerator_checks() -> list[dict[str, Any]]:
    """For `distbench doctor`: whether torch sees each type of accelerator, and has its backend."""
    found = []
    for name in ACCELERATORS:
        module, backend, shown = torch.get_device_module(name), DEVICES[name].backend, name.upper()
        devices, has_backend = f"no {shown} device", dist.is_available() and dist.is_backend_available(backend)
        if ok := bool(module.is_available()):
            version = getattr(torch.version, name)
            devices = f"{module.device_count()} x {module.get_device_name(0)}, {shown} {version}"
        advice = f"to measure GPUs, install a torch built for {shown} and its driver"
        found.append({"name": shown, "ok": ok, "found": devices, "advice": advice})
        found.append({"name": backend.upper(), "ok": has_backend, "found": f"{shown} backend", "advice": advice})
    return found
