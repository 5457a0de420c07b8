"""All direct uses of a device: selection, waiting, clock, memory, description, and the scheduling of ranks on CPUs."""

import gc
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from distbench.spec import UserError
from distbench.spec.devices import DEVICES, built_for, is_accelerator, known_device

POLL_S = 0.005
MEMINFO = Path("/proc/meminfo")
# Filling this many bytes takes the device longer than the host needs to enqueue a collective, and evicts every cache
# (the largest known cache has 256 MiB, on AMD's MI300).
DELAY_BYTES = 256 << 20
THREADS_PER_RANK = 2  # the main thread of a rank, and the thread of gloo
POLICIES = ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")


@dataclass(frozen=True)
class Accelerator:
    """A type of device other than the CPU, by torch's name: CUDA, ROCm (under CUDA's name), XPU, NPU, HPU, MTIA, ...

    The type's module (such as `torch.cuda`) is used: `torch.accelerator` supports one type per build, has no events,
    and cannot wait for a device that is implemented in Python.
    """

    type: str

    @classmethod
    def current(cls) -> "Accelerator | None":
        """Return the accelerator that `torch.accelerator` reports; None if torch has no working accelerator."""
        device = torch.accelerator.current_accelerator(check_available=True)
        return None if device is None else cls(device.type)

    @property
    def module(self) -> Any:
        """Return torch's module for this type of device. Raise UserError if this build of torch has no such module."""
        try:
            return torch.get_device_module(self.type)
        except RuntimeError as error:
            raise UserError(f"--device {self.type}: {self._missing()}") from error

    @property
    def platform(self) -> str:
        """The platform: "rocm" for ROCm builds of torch, else the device type."""
        return "rocm" if self.type == "cuda" and torch.version.hip else self.type

    @property
    def backend(self) -> str:
        """The communication backend from torch's table, or from distbench's table if the device's package is not
        loaded."""
        from_torch = dist.Backend.default_device_backend_map.get(self.type, "") if dist.is_available() else ""
        ours = known_device(self.type).backend
        # After the import of torch's fake backend, the table contains "fake" for a device whose package is not loaded.
        return (ours or from_torch) if from_torch in ("", "fake") else from_torch

    @property
    def version(self) -> str | None:
        """Version of the driver library that torch was built for."""
        return getattr(torch.version, "hip" if self.platform == "rocm" else self.type, None)

    @property
    def is_available(self) -> bool:
        """Return whether torch can use a device of this type."""
        try:
            return bool(self.module.is_available())
        except UserError:
            return False

    @property
    def num_devices(self) -> int:
        """Return the number of devices that this process may use."""
        return int(self.module.device_count()) if self.is_available else 0

    def device(self, local_rank: int) -> torch.device:
        """Select and return the device of a host's rank. Raise UserError without a device for this rank.

        If a launcher makes one device visible per rank, the device's number is 0 for all ranks.
        """
        if not (count := self.num_devices):
            raise UserError(f"--device {self.type}: {self._missing()}")
        if 1 < count <= local_rank:
            raise UserError(
                f"this rank is number {local_rank} on host {os.uname().nodename} (LOCAL_RANK) and may use {count} "
                f"{self.type.upper()} devices; make one device visible per rank, or all devices to all ranks of a host"
            )
        device = torch.device(self.type, local_rank if count > 1 else 0)
        self.module.set_device(device)
        return device

    def event(self) -> Any:
        """Return a new event with timing."""
        return self.module.Event(enable_timing=True)

    def name_of(self, device: torch.device | int) -> str:
        """Return the product name of a device; its type if torch does not report a name."""
        get_name = getattr(self.module, "get_device_name", None)
        return str(get_name(device)) if get_name else self.type

    def memory_query(self, name: str, device: torch.device) -> Any:
        """Call a memory function of torch's module; return None if the module lacks the function, as for MTIA."""
        function = getattr(self.module, name, None)
        return None if function is None else function(device)

    def _missing(self) -> str:
        advice = f"install torch built for {built_for(self.type)} and its driver, or use --device cpu"
        return f"torch {torch.__version__} finds no {self.type.upper()} device; {advice}; see `distbench doctor`"


def select_device(device_type: str) -> torch.device:
    """Select and return this rank's device. Raise UserError without a device."""
    if not is_accelerator(device_type):
        return torch.device(device_type)
    return Accelerator(device_type).device(int(os.environ.get("LOCAL_RANK", "0")))


def identity(device: torch.device) -> str | None:
    """Return the device's UUID, which does not depend on the device's number; None if torch does not report a UUID."""
    if not is_accelerator(device.type):
        return None
    properties = getattr(Accelerator(device.type).module, "get_device_properties", lambda _: None)(device)
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def backend_of(device_type: str) -> str:
    """Return the communication backend for a type of device."""
    return Accelerator(device_type).backend if is_accelerator(device_type) else DEVICES[device_type].backend


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if is_accelerator(device.type):
        Accelerator(device.type).module.synchronize(device)


def ends_within(device: torch.device, seconds: float) -> bool:
    """Return whether the work on the current stream ends within `seconds`; never wait longer."""
    if not is_accelerator(device.type):
        return True
    event, deadline = Accelerator(device.type).event(), time.monotonic() + seconds
    event.record()
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


class HostClock:
    """A clock by CLOCK_MONOTONIC. All processes of a host share this clock, so moments of different ranks are
    comparable.
    """

    shared_between_ranks = True

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._moments: list[float] = []

    def stamp(self) -> None:
        """Record the current moment."""
        self._moments.append(self._now())

    def read(self) -> list[float]:
        """Return all moments since the last read in seconds, in order, and clear them."""
        moments, self._moments = self._moments, []
        return moments


class EventClock:
    """Events on the device's current stream. Moments are relative to the first moment, so ranks are not comparable."""

    shared_between_ranks = False

    def __init__(self, device: torch.device) -> None:
        self._make_event = Accelerator(device.type).event
        self._events: list[Any] = []

    def stamp(self) -> None:
        """Record an event on the current stream."""
        self._events.append(self._make_event())
        self._events[-1].record()

    def read(self) -> list[float]:
        """Wait for all events, return the seconds from the first event to each event, and clear the events."""
        events, self._events = self._events, []
        if not events:
            return []
        events[-1].synchronize()
        return [events[0].elapsed_time(event) / 1e3 for event in events]


Clock = HostClock | EventClock


def clock_of(device: torch.device) -> Clock:
    """Return the clock for samples on this device."""
    return HostClock() if known_device(device.type).waits_on_host else EventClock(device)


def delay(device: torch.device, times: int) -> None:
    """Keep the device busy on its current stream, by `times` fills of DELAY_BYTES, and evict the caches."""
    for _ in range(times):
        torch.empty(DELAY_BYTES, dtype=torch.uint8, device=device).zero_()


def empty_allocator(device: torch.device) -> int:
    """Free the memory of earlier cases, so that peaks belong to the next case; return the bytes that remain
    allocated."""
    gc.collect()
    if not is_accelerator(device.type):
        return 0
    module = Accelerator(device.type).module
    module.synchronize(device)
    module.empty_cache()
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


def allocator_peak(
    device: torch.device, call: Callable[[Callable[[], None]], object], phases: Sequence[str]
) -> dict[str, Any]:
    """Return `peak_bytes`, the peak of allocated bytes on an accelerator during one call, and the peak's phase.

    `peak_reserved_bytes` is the reserved peak since `empty_allocator`. The call stamps the end of each phase. The
    allocator assigns memory when work is enqueued, so a stamp does not wait.
    """
    used = Accelerator(device.type)
    module, peaks = used.module, list[int]()
    reserved = [used.memory_query("max_memory_reserved", device)]

    def stamp() -> None:
        peaks.append(module.max_memory_allocated(device))
        reserved.append(used.memory_query("max_memory_reserved", device))
        module.reset_peak_memory_stats(device)

    module.reset_peak_memory_stats(device)
    call(stamp)
    most_reserved = None if None in reserved else max(reserved)
    peak_phase = phases[peaks.index(max(peaks))]
    return {"peak_bytes": max(peaks), "peak_reserved_bytes": most_reserved, "peak_phase": peak_phase}


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the device, or on CPUs this rank's share of the host's free bytes; 0 if unknown."""
    if is_accelerator(device.type):
        return int((Accelerator(device.type).memory_query("mem_get_info", device) or (0,))[0])
    match = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE) if MEMINFO.exists() else None
    return int(match.group(1)) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if match else 0


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators that a model on this device uses by default."""
    device_states = [Accelerator(device.type).module.get_rng_state(device)] if is_accelerator(device.type) else []
    return [torch.get_rng_state(), *device_states]


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the profiler's activities: the device, and the host for launches and kernel metadata."""
    device_activity = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)
    return [ProfilerActivity.CPU, device_activity]


def products_of_f32() -> list[Any]:
    """Return torch's settings objects with `fp32_precision`, one per library that multiplies f32."""
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    return [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the run file's header fields on the device and its driver; None for parts that are not in this build of
    torch."""
    used = Accelerator(device.type) if is_accelerator(device.type) else None
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl_version() if used is not None and used.backend == DEVICES["cuda"].backend else None,
        "device": device.type,
        "device_name": used.name_of(device) if used else None,
        "num_devices": used.num_devices if used else 0,
    }


def nccl_version() -> str | None:
    """Return the version of torch's NCCL; None if torch reports no version, as in some ROCm builds."""
    try:
        version = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError, ImportError):
        return None
    return ".".join(str(part) for part in version)


def calm_scheduler(device: str) -> None:
    """Schedule this process, and all threads that it starts later, with SCHED_BATCH if there are more threads than
    CPUs.

    Under the default policy, every thread that wakes up may preempt a running thread. With 4 gloo ranks on 2 CPUs, this
    preemption alone increased an all_gather of 1 MB from 1.5 to 3.2 ms, and the distance between its quartiles from 0.4
    to 3.3 ms. SCHED_BATCH (sched(7)) needs no privilege and only disables this preemption. Ranks on an accelerator keep
    the default policy.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if is_accelerator(device) or not hasattr(os, "SCHED_BATCH") or policy_name() != "other":
        return
    if local_ranks > 1 and local_ranks * THREADS_PER_RANK > len(os.sched_getaffinity(0)):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def policy_name() -> str | None:
    """Return this process's scheduling policy: "other" (the default), "batch", "fifo" ...; None if the system has
    none."""
    names = {getattr(os, name): name.removeprefix("SCHED_").lower() for name in dir(os) if name in POLICIES}
    return names.get(os.sched_getscheduler(0)) if hasattr(os, "sched_getscheduler") else None
