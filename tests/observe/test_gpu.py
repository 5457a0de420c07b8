"""What only an accelerator can show: `gpu` needs one, `multi_gpu` two or more. `./run.sh gpu-tests` runs them all.

Tests that start ranks come first, and this process touches no device before: where devices are in exclusive mode, its
own context would keep the ranks from theirs. Their processes are started anew: one that is forked from a process that
has the compiler imported may find the device in use there.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import num_accelerators, run_files
from gpu_tests import text_of
from processes import Ranks
from torch.profiler import profile, record_function

from distbench.observe.profiler_kernels import PHASE, HostCalls, events_in, in_no_phase, phases_among
from distbench.ranks import device as seam
from distbench.records.machine import accelerator_here
from distbench.records.run_file import read_run
from distbench.spec import list_entries
from distbench.spec.mesh import format_mesh, mesh_size

OF_CLUSTERS = {"calibrate", "laboratory", "links", "real-size"}
SHIPPED = {entry.name: entry for entry in list_entries() if not OF_CLUSTERS & set(entry.tags)}


@pytest.fixture
def device_type() -> str:
    current = seam.Accelerator.current()
    assert current is not None
    return current.type


@pytest.fixture
def device(device_type: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return seam.select_device(device_type)


def measured(ranks: Ranks, folder: Path, device_type: str, *requested: str) -> list[Any]:
    """The runs of `distbench run ASKED --quick`, its processes started anew."""
    given = ("run", *requested, "--quick", "--device", device_type, "--results", str(folder))
    done = ranks.cli(*given, real=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return [read_run(path) for path in run_files(folder)]


@pytest.mark.gpu
def test_a_collective_of_one_rank_starts_on_its_device(ranks: Ranks, tmp_path: Path, device_type: str) -> None:
    cases = [
        case for run in measured(ranks, tmp_path, device_type, "collectives", "--mesh", "tp=1") for case in run.cases
    ]
    assert cases and all(case["counters"]["isolated_s"] > 0 for case in cases)


@pytest.mark.gpu
def test_a_step_of_one_rank_is_right_and_traced_and_its_memory_known(
    ranks: Ranks, tmp_path: Path, device_type: str
) -> None:
    (run,) = measured(ranks, tmp_path, device_type, "tp_mlp", "--mesh", "tp=1", "--trace-paths")
    # Its one-rank groups communicate nothing; the profiler tells of the phases.
    assert run.traces and all(trace.get("error") is None and trace["steps_s"] for trace in run.traces)
    for case in run.cases:
        counters = case["counters"]
        assert case["status"] == "ok" and counters["peak_bytes"] > counters["parameter_bytes"] > 0
        # Nothing is left by the variant before but what libraries keep: cuBLAS's workspaces, 32 MiB on Hopper.
        assert counters["baseline_bytes"] <= 128 << 20


@pytest.mark.gpu
def test_doctor_knows_the_device(ranks: Ranks, device_type: str) -> None:
    done = ranks.cli("doctor", "--format", "json", real=True, timeout=300)
    assert done.returncode == 0, done.stderr
    checks = [check for check in json.loads(done.stdout)["checks"] if check.get("device") == device_type]
    assert checks and all(check["ok"] for check in checks)


@pytest.mark.multi_gpu
def test_collectives_are_right_and_isolated_times_are_no_longer_than_samples(
    ranks: Ranks, tmp_path: Path, device_type: str
) -> None:
    for case in (case for run in measured(ranks, tmp_path, device_type, "collectives") for case in run.cases):
        assert case["status"] == "ok" and 0 < case["counters"]["isolated_s"] <= max(case["samples_s"])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_scenario_is_right(ranks: Ranks, tmp_path: Path, device_type: str, name: str) -> None:
    """On its own mesh, where there are devices for that."""
    own = SHIPPED[name].mesh
    mesh = ("--mesh", format_mesh(own)) if mesh_size(own) <= num_accelerators() else ()
    (run,) = measured(ranks, tmp_path, device_type, name, *mesh)
    wrong = [(case["case"]["id"], case.get("error")) for case in run.cases if case["status"] not in ("ok", "skipped")]
    assert wrong == [] and any(case["status"] == "ok" for case in run.cases)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["fsdp_stack", "pipeline"])
def test_a_traced_step_has_times_of_every_phase_and_collective(
    ranks: Ranks, tmp_path: Path, device_type: str, name: str
) -> None:
    """A pipeline's messages too, whose kernels say nothing of themselves."""
    traces = [trace for run in measured(ranks, tmp_path, device_type, name, "--trace-paths") for trace in run.traces]
    assert traces
    for trace in traces:
        assert trace.get("error") is None and trace["exposed_reason"] is None and trace["steps_s"]
        assert trace["agreement"]["differences"] == []
        group_size, completed = (trace["columns"].index(name) for name in ("group_size", "completed_s"))
        assert all(row[completed] is not None for row in trace["rows"] if row[group_size] > 1)


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

    result = seam.allocator_peak(device, call, ("forward",))
    assert 64 << 20 <= result["peak_bytes"] - before <= result["peak_reserved_bytes"]
    assert seam.empty_allocator(device) == before
    assert seam.free_bytes(device) > 0


@pytest.mark.gpu
def test_the_device_is_told(device: torch.device) -> None:
    facts = seam.device_facts(device)
    assert facts["device_name"] and facts["num_devices"] >= 1
    assert accelerator_here() == (device.type, facts["num_devices"]), "counted without torch"


@pytest.mark.gpu
def test_what_each_phase_launched_is_found_in_this_profilers_trace(device: torch.device, tmp_path: Path) -> None:
    """Backward's is launched by autograd's thread, the optimizer's within an annotation of its own."""
    model = torch.nn.Linear(512, 512, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    given = torch.ones(512, 512, device=device)

    def step() -> None:
        with record_function(f"{PHASE}forward"):
            loss = model(given).sum()
        with record_function(f"{PHASE}backward"):
            loss.backward()
        with record_function(f"{PHASE}optimizer"):
            optimizer.step()

    for _ in range(2):  # a first profile sets the vendor's library up
        with profile(activities=seam.profiler_activities(device)) as profiler:
            step()
            seam.synchronize(device)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = list(events_in(tmp_path / "trace.json"))
    launches = HostCalls(events)
    phases = phases_among(events, launches)
    assert [phase.name for phase in phases] == ["forward", "backward", "optimizer"]
    assert all(phase.begun_s < phase.ended_s for phase in phases)
    ends = [phase.ended_s for phase in phases]
    assert ends == sorted(set(ends)), "each phase has work of its own"
    lost, outside, num_events = in_no_phase(events, launches)
    assert num_events > 0 == lost == outside


def test_the_report_says_what_passed() -> None:
    rows = [("a", "passed", 1.25, ""), ("b", "failed", 2.0, "assert 1 == 2"), ("c", "skipped", 0.0, "no | GPU")]
    text = text_of(rows, "box: 8 GPUs", "today")
    assert "today: 1 passed, 1 failed, 1 skipped" in text and "box: 8 GPUs" in text
    assert "| a | passed | 1.2 |  |" in text and "| c | skipped | 0.0 | no \\| GPU |" in text
    assert text.rstrip().endswith("assert 1 == 2\n```")
