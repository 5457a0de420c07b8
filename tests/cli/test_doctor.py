"""`distbench doctor` on plain data: its summary and its checks."""

from typing import Any

import pytest

from distbench.cli import doctor
from distbench.spec.devices import built_for
from distbench.spec.errors import UserError
from distbench.spec.versions import INSTALL

HOST = {"machine": "box-12", "cpu_model": "x86_64", "num_cpus": 2, "memory_bytes": 16_000_000_000}
GOOD = ("torch version", "torch.distributed", "gloo")


def check(name: str, ok: bool, advice: str = "install it") -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": "found it" if ok else "nothing", "advice": advice}


def examined(monkeypatch: pytest.MonkeyPatch, answer: Any, num_gpus: int = 0) -> dict[str, Any]:
    def ask(module: str, *, timeout_s: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(doctor, "ask_child", ask)
    monkeypatch.setattr(doctor, "host_facts", lambda: HOST)
    monkeypatch.setattr(doctor, "accelerator_here", lambda: ("cuda", num_gpus) if num_gpus else ("cpu", 0))
    return doctor.examine()


@pytest.mark.parametrize("missing", GOOD)
def test_a_machine_is_usable_with_torch_and_gloo(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    checks = [check(name, True) for name in GOOD]
    assert examined(monkeypatch, [*checks, check("CUDA", False)])["usable"]
    checks = [check(name, name != missing) for name in GOOD]
    assert not examined(monkeypatch, [*checks, check("CUDA", True)])["usable"]


@pytest.mark.parametrize(("num_gpus", "cuda", "ok"), [(0, False, True), (2, True, True), (2, False, False)])
def test_gpus_that_this_torch_cannot_use_are_told(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, cuda: bool, ok: bool
) -> None:
    gpus = examined(monkeypatch, [check("ROCM", cuda) | {"device": "cuda"}], num_gpus)["checks"][-1]
    assert (gpus["name"], gpus["found"], gpus["ok"]) == ("GPUs of this host", str(num_gpus), ok)


def test_gpus_whose_driver_is_gone_are_told_though_nccl_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    message = [check("CUDA", False) | {"device": "cuda"}, check("NCCL", True) | {"device": "cuda"}]
    assert not examined(monkeypatch, message, 8)["checks"][-1]["ok"]


def test_amds_gpus_are_not_told_to_take_nvidias_torch() -> None:
    assert "ROCm" in built_for("cuda") and built_for("xpu") == "XPU"


def test_without_an_answer_torch_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = examined(monkeypatch, UserError("No module named 'torch'"))
    assert not result["usable"]
    assert doctor.check_lines(result["checks"]) == ["MISSING torch  No module named 'torch'", f"        -> {INSTALL}"]
    lines = doctor.summary_lines(result)
    assert lines[0] == "machine: box-12: x86_64, 2 CPUs, 14.9 GiB" and lines[1].startswith("torch: cannot be used")
    assert lines[-1].startswith("FAIL: this machine cannot run distbench. torch: No module") and INSTALL in lines[-1]


def test_lines_are_aligned_and_only_what_is_missing_has_advice() -> None:
    assert doctor.check_lines([check("gloo", True), check("a long name", False)]) == [
        "ok      gloo         found it",
        "MISSING a long name  nothing",
        "        -> install it",
    ]


def test_six_lines_end_with_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [check(name, ok) | {"feature": "async TP"} for name, ok in (("a", True), ("b", False))]
    no_gpu = check("CUDA", False) | {"device": "cuda"}
    findings = examined(monkeypatch, [*(check(name, True) for name in GOOD), no_gpu, *names])
    machine, torch, devices, launch, not_here, verdict = doctor.summary_lines(findings)
    assert "box-12" in machine and devices.endswith("at most 8 ranks") and "gloo" in launch
    assert "1 of 2 private names found" in torch and "with gloo;" in torch
    assert "CUDA, async TP" in not_here and verdict.startswith("PASS: ")
    findings["checks"].append(check("tracing", False) | {"deep": True})
    assert doctor.summary_lines(findings)[-1].startswith("FAIL: ") and "tracing" in doctor.summary_lines(findings)[-1]


def test_a_newer_torch_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = check("torch version", False, "torch 2.99 is newer") | {"mark": "warning"}
    findings = examined(monkeypatch, [newer, *(check(name, True) for name in GOOD[1:])])
    *_, warning, verdict = doctor.summary_lines(findings)
    assert warning.startswith("warning: ") and "2.99 is newer" in warning and verdict.startswith("PASS: ")
