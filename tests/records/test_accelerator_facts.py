"""What nvidia-smi tells, from its output as its manual and recorded runs have it: header, doctor."""

import shutil
from collections.abc import Sequence

import pytest

from distbench.cli import doctor
from distbench.records import machine as told
from distbench.records.machine import (
    accelerator_facts,
    checks_of,
    devices_in,
    is_recorded_variable,
    matrix_of,
    reasons_in,
)
from distbench.spec.devices import SWITCHED_OFF

DEVICES = """\
0, NVIDIA H100 80GB HBM3, 550.54.15, 1980, 1980, 2619, 34, 71.02, 700.00, Enabled, Disabled, 0x0000000000000001
1, NVIDIA H100 80GB HBM3, 550.54.15, 1410, 1980, 2619, 86, 690.11, 700.00, Enabled, [N/A], 0x0000000000000024
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-55,112-167\t0\t\tN/A
GPU2\tSYS\tNV18\t X \tPIX\t56-111\t1\t\tN/A
NIC0\tPXB\tSYS\tPIX\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
PEERS = """\
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tOK\t
 GPU2\tCNS\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def smi(command: Sequence[str]) -> str | None:
    """A driver that has the older name of the reasons only."""
    if "topo" in command:
        return PEERS if "-p2p" in command else TOPOLOGY
    return DEVICES if "throttle" in command[1] else None


@pytest.fixture(autouse=True)
def has_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told.shutil, "which", lambda name: f"/usr/bin/{name}")


def test_the_header_has_driver_clocks_and_links() -> None:
    facts = accelerator_facts(smi)
    assert facts["driver"] == "550.54.15" and facts["topology"] == {"NV18": 2, "SYS": 1}
    first, second = facts["accelerators"]
    assert (first["clocks.current.sm"], first["clocks.max.sm"], first["temperature.gpu"]) == (1980, 1980, 34)
    assert first["slowed_by"] == [] and second["slowed_by"] == ["power cap", "heat (software)"]
    assert second["mig.mode.current"] is None and second["power.limit"] == 700


def test_the_header_has_the_variables_that_change_what_is_measured() -> None:
    """Those that a review of CUDA's paths found missing."""
    missing = "PYTORCH_ALLOC_CONF NCCL_NVLS_ENABLE NCCL_P2P_LEVEL NCCL_IB_HCA NCCL_CUMEM_ENABLE NVIDIA_TF32_OVERRIDE"
    later = "TORCH_NCCL_HIGH_PRIORITY NCCL_MNNVL_ENABLE RCCL_MSCCLPP_ENABLE CCL_ATL_TRANSPORT ZE_AFFINITY_MASK"
    assert [name for name in (*missing.split(), *later.split()) if not is_recorded_variable(name)] == []
    assert not any(
        map(is_recorded_variable, ("HOME", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "MY_NCCL_KEY"))
    )


def test_without_the_command_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert accelerator_facts(smi) == {} and checks_of(smi, {}, SWITCHED_OFF) == []


def test_what_cannot_be_read_is_left_out() -> None:
    assert devices_in("No devices were found\n") == [] and matrix_of("") == {} == matrix_of("\tGPU0\nGPU0 X")
    assert reasons_in("[N/A]") == [] and reasons_in("0x1") == []
    nothing = accelerator_facts(lambda command: None)
    assert nothing == {"driver": None, "accelerators": [], "topology": {}}


def test_doctor_says_what_is_slow_and_what_is_off() -> None:
    checks = {
        one["name"]: one for one in checks_of(smi, {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "1"}, SWITCHED_OFF)
    }
    assert {name: one["ok"] for name, one in checks.items()} == {
        "switched off": False,
        "GPU clocks": False,
        "GPU driver": True,
        "GPU links": False,
        "GPU peer access": False,
    }
    assert checks["switched off"]["found"] == "NCCL_P2P_DISABLE=1"
    assert checks["GPU clocks"]["found"] == "1410 to 1980 MHz now, maximum 1980 MHz"
    assert checks["GPU clocks"]["advice"].startswith("GPU1 is limited by power cap, heat (software), so ")
    assert checks["GPU links"]["found"] == "NV18 between 2 pairs, SYS between 1 pair"
    assert "GPU0-GPU2 use a slower connection" in checks["GPU links"]["advice"]
    assert checks["GPU peer access"]["found"] == "2 of 3 pairs"
    assert checks["GPU peer access"]["advice"] == "GPU0-GPU2 have no peer access (CNS), so NCCL copies through the host"
    assert checks["GPU driver"]["found"] == "driver 550.54.15, persistence on, MIG off"
    lines = doctor.check_lines([*checks.values()])
    assert any(line.startswith("LOOK    GPU clocks") for line in lines)


BROKEN = """\
[Unknown Error], [GPU is lost], 550.54.15, ERR!, [N/A], N/A, ERR!, [Unknown Error], 700.00, [N/A], [N/A], 0x8
1, NVIDIA H100, 550.54.15, 1980, 1980, 2619, 34, 71.02, 700.00, Enabled, Disabled, Not Supported
Unable to determine the device handle for GPU0000:18:00.0: Unknown Error
"""


def test_a_device_that_does_not_answer_is_left_without_figures() -> None:
    """As nvidia-smi has one that fell off the bus, or whose sensors fail."""
    lost, other = devices_in(BROKEN)
    assert {lost[field] for field in lost if field not in ("driver_version", "power.limit", "slowed_by")} == {None}
    assert other["temperature.gpu"] == 34 and other["slowed_by"] == []
    checks = {one["name"]: one for one in checks_of(lambda command: BROKEN, {}, SWITCHED_OFF)}
    assert checks["GPU clocks"]["found"] == "1980 to 1980 MHz now, maximum 1980 MHz"
    assert checks["GPU clocks"]["advice"].startswith("GPU0 is limited by hardware slowdown")
    silent = BROKEN.replace("550.54.15", "[N/A]", 1)
    message = {one["name"]: one["found"] for one in checks_of(lambda command: silent, {}, SWITCHED_OFF)}
    assert message["GPU driver"] == "driver 550.54.15, persistence on, MIG off"
    assert accelerator_facts(lambda command: silent)["driver"] == "550.54.15"


@pytest.mark.parametrize(
    "text", ["", "\x00\ufffd, , ,\n", "No devices were found\n", "a,b\n" * 3, "\tGPU0\tGPU1\n GPU0\n"]
)
def test_garbage_is_no_answer(text: str) -> None:
    assert [one["name"] for one in checks_of(lambda command: text, {}, SWITCHED_OFF)] == ["switched off"]
    assert accelerator_facts(lambda command: text) == {"driver": None, "accelerators": [], "topology": {}}


def test_what_is_off_is_told_without_the_command_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (result,) = checks_of(smi, {"CUDA_LAUNCH_BLOCKING": "1"}, SWITCHED_OFF)
    assert (result["name"], result["found"], result["ok"]) == ("switched off", "CUDA_LAUNCH_BLOCKING=1", False)
