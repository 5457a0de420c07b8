"""Peak memory of a stretch of work: the allocator's own count on CUDA, the growth of resident memory on CPU."""

import ctypes
import gc
import os
import re
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")
MEMINFO = Path("/proc/meminfo")
CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Counts from the moment it is made until `read`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _give_back_freed_memory()
            self._start = _resident("VmRSS") if _reset_peak() else None

    def read(self) -> dict[str, Any]:
        """Bytes: `peak_allocated_bytes` and `peak_reserved_bytes` on CUDA; `peak_growth_bytes` on CPU, None where
        the system does not report it."""
        if self._device.type == "cuda":
            return {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            }
        peak = _resident("VmHWM")
        known = self._start is not None and peak is not None
        return {"peak_growth_bytes": max(peak - self._start, 0) if known else None}  # type: ignore[operator]


def free_bytes(device: torch.device) -> int:
    """Memory that this rank could still take, where the ranks of a host share what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    match = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE) if MEMINFO.exists() else None
    return int(match.group(1)) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if match else 0


def _give_back_freed_memory() -> None:
    """Return what earlier cases freed to the system, or this case's growth would hide in their pages (glibc only)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int | None:
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) * 1024 if match else None
