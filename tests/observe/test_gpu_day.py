"""`./run.sh gpu-day`: a failed stage keeps the other sections, and the comparison of measured and simulated steps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_day
import pytest
from conftest import ROOT
from gpu_day import COMPARED, LIMIT_S, SIMULATED, Done, Stage
from processes import Children

MEASURED = {"status": "ok", "peak_bytes": 2**30, "peak_reserved_bytes": 2 * 2**30}
MEMORY = {"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 3 * 2**30}


def compared(*ranges_s: list[float] | None) -> dict[str, str]:
    """The outputs of both commands: measured steps of 100 ms, simulated ones of 110 ms."""
    names = [f"batch={number}" for number, _ in enumerate(ranges_s)]
    simulated = [
        {"variant": name, "step_s": 0.11, "step_range_s": limits, "memory": MEMORY}
        for name, limits in zip(names, ranges_s, strict=True)
    ]
    measured = [{**MEASURED, "variant": name, "median_s": 0.1} for name in names]
    failed = {"variant": "batch=0", "status": "failed", "median_s": None}
    return {COMPARED: json.dumps([*measured, failed]), SIMULATED: json.dumps(simulated)}


def test_a_failed_stage_and_a_stage_over_its_limit_keep_the_other_sections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = compared([0.09, 0.12], [0.105, 0.12])
    texts: list[str] = []

    def run(words: Sequence[str], limit_s: float, log: Path) -> Done:
        texts.append(report.read_text() if report.exists() else "")
        return {
            "doctor": Done(0, "2 CPUs", ""),
            "breaks": Done(1, "half a table", "warning\nerror: no | device\n"),
            "hangs": Done(None, "step 3 of 10", ""),
        }.get(words[0]) or Done(0, outputs[words[0]], "")

    report = tmp_path / "gpu-day.md"
    stages = [
        Stage("Doctor", 60, lambda: ["doctor"]),
        Stage("Tests", 60, lambda: ["breaks"]),
        Stage("Calibration", 7, lambda: ["hangs"]),
        Stage(SIMULATED, 60, lambda: [SIMULATED]),
        Stage(COMPARED, 60, lambda: [COMPARED], gpu_day.comparison),
        Stage("History", 60, lambda: ["doctor"], lambda outputs: gpu_day.history_section(outputs["History"])),
    ]
    monkeypatch.setattr(gpu_day, "REPORT", report)
    monkeypatch.setattr(gpu_day, "FOLDER", tmp_path / "day")
    monkeypatch.setattr(gpu_day.gpu_tests, "REPORT", tmp_path / "gpu-tests.md")
    monkeypatch.setattr(gpu_day, "stages_of", lambda *_: stages)
    monkeypatch.setattr(gpu_day, "run_command", run)
    assert gpu_day.main(["--rehearse"]) == 1
    text = report.read_text()
    assert "3 of 6 stages passed" in text and "3 of 6 stages passed" in capsys.readouterr().out
    assert "| Tests | failed: error: no \\| device |" in text and "half a table" in text
    assert "| Calibration | failed: over its limit of 7 s |" in text and "step 3 of 10" in text
    assert "| History | failed: JSONDecodeError" in text
    assert "median error 10% over 2 variants; 1 of 2 measured times (50%) are within" in text
    assert "| batch=0 | 100.0 | 110.0 | 90.0-120.0 | 1.10 | yes |" in text
    assert "| batch=1 | 100.0 | 110.0 | 105.0-120.0 | 1.10 | no |" in text
    assert "| batch=1 | 1.000 | 1.000 | 1.000 | 2.000 | 3.000 | 1.500 |" in text
    # The report of the stages before is complete when the next stage starts.
    assert "half a table" in texts[2] and "step 3 of 10" in texts[3] and texts[0] == ""


def test_without_error_ranges_no_variant_is_within_or_outside() -> None:
    lines = gpu_day.comparison(compared(None))
    assert "no error range" in lines[1] and any(line.endswith("| - | 1.10 | - |") for line in lines)
    with pytest.raises(ValueError, match="both measured and simulated"):
        gpu_day.comparison({COMPARED: "[]"})


@pytest.mark.parametrize(("device", "num_devices"), [("cpu", 0), ("cuda", 1), ("cuda", 8), ("xpu", 1)])
def test_the_limits_of_all_stages_are_within_25_minutes(device: str, num_devices: int) -> None:
    stages: list[Any] = gpu_day.stages_of(device, num_devices, "h100")
    assert sum(stage.limit_s for stage in stages) <= LIMIT_S
    for stage in stages:
        if stage.title == "Calibration":
            words = [*stage.command()]
            assert ("--only" in words) == (num_devices < 2) and "--hardware-out" in words
            assert device == "cpu" or words[words.index("--base") + 1] == "h100"


def test_without_an_accelerator_the_command_names_the_rehearsal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_day, "accelerator_here", lambda: ("cpu", 0))
    assert gpu_day.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.long
def test_a_rehearsal_on_the_cpu_passes(children: Children) -> None:
    """All stages but the calibration, which rejects its own measurement on a busy machine."""
    done = children.run("./run.sh", "gpu-day", "--rehearse", "--hardware", "h100", timeout=600)
    text = (ROOT / "build" / "gpu-day.md").read_text()
    failed = [line for line in text.splitlines() if "| failed: " in line and not line.startswith("| Calibration ")]
    assert failed == [] and "over 10 variants" in text, done.stdout
    assert "1 passed, 0 failed" in text and "forward  backward  optimizer" in text
