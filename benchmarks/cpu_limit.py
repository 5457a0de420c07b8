"""A limit on the CPU that some processes get, by a cgroup: of version 1 where its CPU controller is mounted, else of
version 2.

Source: the kernel's Documentation/scheduler/sched-bwc.rst (version 1) and admin-guide/cgroup-v2.rst. Measured launches
used version 1; what is written for version 2 is held to the kernel's documentation by a test.
"""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000  # the kernel's own default, as containers have it
# The most of both: 1024 shares, and a weight of 100, are what a group has by itself.
MOST_SHARES, MOST_WEIGHT = 1 << 18, 10_000


class NoCpuLimit(Exception):
    """This machine lets nobody limit a process's CPU."""


class CpuLimit:
    """A cgroup of one rank, which comes before whatever else wants its CPU, as on a host of its own.

    Args:
        name: of the group.
        root: where cgroups are mounted.

    Raises:
        NoCpuLimit: there are none, they have no CPU controller, or it may not be used.
    """

    def __init__(self, name: str, root: Path = CGROUPS) -> None:
        self._version = _version(root)
        self.folder = root / ("cpu" if self._version == 1 else "") / name
        try:
            if self._version == 2:
                (root / "cgroup.subtree_control").write_text("+cpu")
            self.folder.mkdir(exist_ok=True)
            file, weight = ("cpu.shares", MOST_SHARES) if self._version == 1 else ("cpu.weight", MOST_WEIGHT)
            (self.folder / file).write_text(str(weight))
            self.set(None)
        except OSError as error:
            # Of version 2 a group that has processes of its own gives no controller on (EBUSY).
            advice = "; a container's group has processes of its own: try on the host" if self._version == 2 else ""
            raise NoCpuLimit(
                f"needs cgroups (here version {self._version}) that may be set ({error}){advice}"
            ) from error

    def set(self, share: float | None, period_us: int = PERIOD_US) -> None:
        """So much of one CPU in each period; None for no limit."""
        quota = None if share is None else round(share * period_us)
        if self._version == 1:
            (self.folder / "cpu.cfs_period_us").write_text(str(period_us))
            (self.folder / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
        else:
            (self.folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {period_us}")


def _version(root: Path) -> int:
    """Of the hierarchy that has the CPU controller: where both are mounted, one of them has it."""
    if (root / "cpu").is_dir():
        return 1
    try:
        has_it = "cpu" in (root / "cgroup.controllers").read_text().split()
    except OSError as error:
        raise NoCpuLimit(f"needs cgroups, and {root} has none ({error})") from error
    if not has_it:
        raise NoCpuLimit(f"needs cgroups with a CPU controller, and {root} (version 2) has none")
    return 2
