"""Ranks that would compute on another type of device than the others are refused before they form process groups.

Each host's command finds its own accelerators: one whose driver is gone would go on with CPUs, and its ranks would form
other groups than those that wait for them.
"""

import json
import os
from typing import Protocol

from distbench.spec import UserError
from distbench.worker.hosts.alike import named


class SharedStore(Protocol):
    """What is asked of torch's store."""

    def set(self, key: str, value: str) -> None:
        """Leave a value."""

    def get(self, key: str) -> bytes:
        """A value, once it is there."""

    def add(self, key: str, amount: int) -> int:
        """Count."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Several values."""


def require_same_device(store: SharedStore, rank: int, world_size: int, device: str) -> None:
    """Refuse types of device that differ, on all ranks alike.

    Args:
        store: all ranks' own of this job, before there is any group.
        device: this rank's type.

    Raises:
        UserError: some rank has another one.
    """
    store.set(f"device/{rank}", json.dumps([device, os.uname().nodename]))
    if store.add("device/ranks", 1) == world_size:  # who comes last looks for all, or each would ask for each
        told = store.multi_get([f"device/{other}" for other in range(world_size)])
        store.set("device/differs", _differing([json.loads(one) for one in told]))
    if why := store.get("device/differs").decode():
        raise UserError(why)


def _differing(told: list[tuple[str, str]]) -> str:
    (first, _), hosts = told[0], [host for _, host in told]
    if not (others := [rank for rank, (device, _) in enumerate(told) if device != first]):
        return ""
    theirs = ", ".join(sorted({told[rank][0] for rank in others}))
    what = f"the device of {named(others, hosts)} is {theirs}, of {named([0], hosts)} {first}"
    return f"{what}; say --device, and see `distbench doctor` on those hosts"
