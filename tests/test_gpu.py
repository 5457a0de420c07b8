"""What only an accelerator can show: `gpu` needs one, `multi_gpu` two or more. `./run.sh gpu-tests` runs them all."""

from pathlib import Path

import pytest
import torch
from conftest import run_files
from gpu_tests import text_of
from processes import Ranks

from distbench.runs.machine import accelerator_here
from distbench.runs.run_file import read_run
from distbench.worker.rank import device as seam


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    current = seam.Accelerator.current()
    assert current is not None
    return seam.select_device(current.type)


@pytest.mark.gpu
def test_events_time_the_device_and_not_its_host(device: torch.device) -> None:
    clock = seam.clock_of(device)
    for _ in range(3):
        clock.stamp()
        seam.delay(device, 4)
    clock.stamp()
    moments = clock.read()
    assert moments == sorted(moments) and moments[0] == 0 < moments[-1] < 10


@pytest.mark.gpu
def test_memory_is_given_back_and_its_peak_read(device: torch.device) -> None:
    before = seam.empty_allocator(device)

    def call(stamp: object) -> None:
        torch.empty(64 << 20, dtype=torch.uint8, device=device)
        stamp()  # type: ignore[operator]

    found = seam.allocator_peak(device, call, ("forward",))
    assert 64 << 20 <= found["peak_bytes"] - before <= found["peak_reserved_bytes"]
    assert seam.empty_allocator(device) == before
    assert seam.free_bytes(device) > 0


@pytest.mark.gpu
def test_the_device_is_told(device: torch.device) -> None:
    facts = seam.device_facts(device)
    assert facts["device_name"] and facts["num_devices"] >= 1
    assert accelerator_here() == (device.type, facts["num_devices"]), "counted without torch"


@pytest.mark.gpu
def test_a_collective_of_one_rank_starts_on_its_device(ranks: Ranks, tmp_path: Path, device: torch.device) -> None:
    given = ("--quick", "--mesh", "tp=1", "--device", device.type, "--out", str(tmp_path))
    done = ranks.cli("run", "collectives", *given, timeout=300)
    assert done.returncode == 0, done.stderr
    cases = [case for path in run_files(tmp_path) for case in read_run(path).cases]
    assert cases and all(case["counters"]["isolated_s"] > 0 for case in cases)


@pytest.mark.multi_gpu
def test_collectives_are_right_and_isolated_times_are_no_longer_than_samples(
    ranks: Ranks, tmp_path: Path, device: torch.device
) -> None:
    done = ranks.cli("run", "collectives", "--quick", "--device", device.type, "--out", str(tmp_path), timeout=300)
    assert done.returncode == 0, done.stderr
    for case in (case for path in run_files(tmp_path) for case in read_run(path).cases):
        assert case["status"] == "ok" and 0 < case["counters"]["isolated_s"] <= max(case["samples_s"])


@pytest.mark.multi_gpu
def test_a_traced_step_has_times_of_every_phase_and_collective(
    ranks: Ranks, tmp_path: Path, device: torch.device
) -> None:
    given = ("--quick", "--trace-paths", "--device", device.type, "--out", str(tmp_path))
    done = ranks.cli("run", "fsdp_stack", *given, timeout=300)
    assert done.returncode == 0, done.stderr
    traces = [trace for path in run_files(tmp_path) for trace in read_run(path).traces]
    assert traces
    for trace in traces:
        assert trace.get("error") is None and trace["exposed_reason"] is None and trace["steps_s"]
        completed = trace["columns"].index("completed_s")
        assert all(row[completed] is not None for row in trace["rows"])


def test_the_report_says_what_passed() -> None:
    rows = [("a", "passed", 1.25, ""), ("b", "failed", 2.0, "assert 1 == 2"), ("c", "skipped", 0.0, "no | GPU")]
    text = text_of(rows, "box: 8 GPUs", "today")
    assert "today: 1 passed, 1 failed, 1 skipped" in text and "box: 8 GPUs" in text
    assert "| a | passed | 1.2 |  |" in text and "| c | skipped | 0.0 | no \\| GPU |" in text
    assert text.rstrip().endswith("assert 1 == 2\n```")
