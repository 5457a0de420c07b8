"""What the lab writes to limit a CPU, by the kernel's documentation of cgroups of both versions; plain folders."""

from pathlib import Path

import pytest

from benchmarks.cpu_limit import CpuLimit, NoCpuLimit


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_version_1_where_its_controller_is_mounted_though_version_2_is_too(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "unified").mkdir()
    limit = CpuLimit("rank", tmp_path)
    assert limit.folder == tmp_path / "cpu" / "rank"
    free = {"cpu.shares": "262144", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "-1"}
    assert written(limit.folder) == free
    limit.set(0.5)
    assert written(limit.folder) == {**free, "cpu.cfs_quota_us": "50000"}
    limit.set(None)
    assert written(limit.folder) == free


def test_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    limit = CpuLimit("rank", tmp_path)
    assert limit.folder == tmp_path / "rank"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert written(limit.folder) == {"cpu.weight": "10000", "cpu.max": "max 100000"}
    limit.set(0.5)
    assert written(limit.folder) == {"cpu.weight": "10000", "cpu.max": "50000 100000"}


def test_why_there_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoCpuLimit, match=r"needs cgroups, and .* has none"):
        CpuLimit("rank", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpuset io\n")
    with pytest.raises(NoCpuLimit, match=r"with a CPU controller, and .* \(version 2\) has none"):
        CpuLimit("rank", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    (tmp_path / "cgroup.subtree_control").mkdir()  # as little to be written as a busy group's
    with pytest.raises(NoCpuLimit, match=r"here version 2\) that may be set .* try on the host"):
        CpuLimit("rank", tmp_path)
