"""A hardware file of an accelerator: sizes that are measured, and the rates that follow from the times."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Children
from torch.utils._python_dispatch import TorchDispatchMode

from distbench.cases.calibration import HOST_LAYERS, OVERLAP, compute_cases
from distbench.ranks.measure import no_stamp
from distbench.records.run_file import Run
from distbench.simulate import measured_device
from distbench.simulate.hardware_file import Figure, Hardware, load_hardware, shipped_for
from distbench.simulate.measured_device import Point, write_device
from distbench.simulate.measured_links import base_hardware
from distbench.simulate.operator_costs import link_s, operator_s
from distbench.spec import Scenario
from distbench.spec.errors import UserError

CHANGED = {
    **{"matmul_bf16_flops": 500e12, "matmul_f32_flops": 48e12, "attention_flops": 300e12, "memory_share": 0.7},
    **{"attention_full_flops": 350e12, "attention_backward_flops": 250e12, "attention_backward_full_flops": 280e12},
    **{"attention_half_length": 400.0, "host_s": 9e-6, "overlap_slowdown": 0.3},
    **{"node_bytes_per_s": 300e9, "node_base_s": 2e-5},
}
REPEATS = 10


def machine() -> Hardware:
    """The machine that is to be found again."""
    base = load_hardware("h100")
    return replace(base, figures=base.figures | {name: Figure(value, "guess", "") for name, value in CHANGED.items()})


def opened_operators(num_ranks: int) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
    """Yield (parameters, counters, the case) of every operator, on a device without memory or values."""
    context: Any = SimpleNamespace(
        mesh=SimpleNamespace(size=lambda: num_ranks),
        mesh_dims=("tp",),
        hosts=("one",) * num_ranks,
        device=SimpleNamespace(type="cuda"),
    )
    specs = [*compute_cases(Scenario(compute=5), context)]
    context.device = torch.device("meta")
    for spec in specs:
        if spec.case.params["what"] != "collective":
            with spec.open() as case:
                yield spec.case.params, case.fields["counters"], case


def run_of(num_ranks: int, hardware: Hardware) -> Run:
    """A run with the times of a machine."""
    times: list[tuple[dict[str, Any], int, float]] = []
    for params, counters, _ in opened_operators(num_ranks):
        what, size, amount = params["what"], params["size"], counters["amount"]
        if what == "memory":
            seconds = amount / (hardware["memory_bytes_per_s"] * hardware["memory_share"])
        elif what == "host":
            seconds = hardware["host_s"]
        elif what == "overlap":
            seconds = {"compute": 0.010, "communication": 0.004, "both": 0.010 + 0.3 * 0.004}[size]
        else:
            seconds = operator_s(Point(what, size, amount, 0).operator, hardware, None, num_ranks)
        times.append((params, amount, seconds))
    for op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all") if num_ranks > 1 else ():
        for amount in (1 << 16, 1 << 20, 1 << 24, 1 << 27, 1 << 28):
            params = {"what": "collective", "op": op, "lies": "", "size_bytes": amount}
            times.append((params, amount, link_s(op, amount, num_ranks, [num_ranks], hardware)))
    cases = [
        {
            "case": {"id": f"{params}{amount}", "kind": "compute", "params": params},
            **{"status": "ok", "group_size": num_ranks, "samples_s": [seconds * REPEATS] * 3},
            "counters": {"amount": amount, "repeats": REPEATS},
        }
        for params, amount, seconds in times
    ]
    environment = {"world_size": num_ranks, "device": "cuda", "backend": "nccl", "hosts": ["one"] * num_ranks}
    header = {"run_id": "r", "environment": environment, "job": {"mesh": {"tp": num_ranks}}}
    return Run(Path("x.jsonl"), header, cases, None, [])


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_the_machine_that_made_the_run_is_found(num_ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    blocks = write_device(file, *base_hardware("h100"), run_of(num_ranks, machine()))
    measured = load_hardware(str(file))
    of_one_device = {name: CHANGED[name] for name in CHANGED if not name.startswith(("overlap", "node"))}
    wanted = CHANGED if num_ranks > 1 else of_one_device
    assert {name: measured[name] for name in wanted} == pytest.approx(wanted, rel=0.01)
    assert wanted.keys() <= measured.of_basis("measured").keys()
    base = load_hardware("h100")
    assert {name for name in base.figures if measured[name] != base[name]} == wanted.keys()
    assert measured.name == "h100-measured"
    errors = next(block for block in blocks if getattr(block, "title", "") == "operators with these figures")
    assert {row[-1] for row in errors.rows} <= {"+0 %", "-0 %"}  # type: ignore[union-attr]


def test_a_run_without_an_operator_names_the_operator(tmp_path: Path) -> None:
    run = run_of(1, machine())
    cases = [case for case in run.cases if case["case"]["params"]["what"] != "attention_full"]
    with pytest.raises(UserError, match=r"has no attention_full; measure with distbench calibrate"):
        write_device(tmp_path / "here.json", *base_hardware("h100"), replace(run, cases=cases))


def test_another_device_than_the_base_is_named(tmp_path: Path) -> None:
    machine_above = replace(machine(), figures=machine().figures | {"matmul_bf16_flops": Figure(2e15, "guess", "")})
    with pytest.raises(UserError, match=r"above figures.peak_bf16_flops.*--base the hardware file of this device"):
        write_device(tmp_path / "here.json", *base_hardware("h100"), run_of(1, machine_above))


def test_more_devices_on_a_host_than_the_base_has_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    write_device(file, *base_hardware("h100"), run_of(16, machine()))
    assert load_hardware(str(file)).devices_per_node == 16


def test_every_operator_of_an_accelerator_runs() -> None:
    kinds = set()
    for params, counters, case in opened_operators(8):
        kinds.add(params["what"])
        if params["what"] != "overlap":  # needs a process group
            case.call(no_stamp)
        assert counters["amount"] > 0 and 1 <= counters["repeats"] <= 2000
    assert kinds == {*measured_device.MATMULS, *measured_device.ATTENTIONS, "memory", "host", "overlap"}
    assert OVERLAP == measured_device.OVERLAP


def test_the_chain_of_small_operators_has_as_many_as_are_counted() -> None:
    class Kernels(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # A view's result has its input's memory, which the operator does not write to.
            aliases = [result.alias_info for result in func._schema.returns]
            self.count += not any(alias is not None and not alias.is_write for alias in aliases)
            return func(*args, **(kwargs or {}))

    ((counters, case),) = [
        (counters, case) for params, counters, case in opened_operators(1) if params["what"] == "host"
    ]
    with Kernels() as kernels:
        case.call(no_stamp)
    assert kernels.count == counters["repeats"]
    assert counters["repeats"] > 5 * HOST_LAYERS


@pytest.mark.parametrize(
    ("device_name", "hardware"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_the_device_has_its_shipped_hardware_file(device_name: str, hardware: str) -> None:
    assert shipped_for(device_name, "--base") == hardware


def test_a_device_without_a_shipped_hardware_file_is_an_error() -> None:
    with pytest.raises(UserError, match=r"GH200.*give --base NAME"):
        shipped_for("NVIDIA GH200 480GB", "--base")


def test_lengths_at_which_attention_does_not_get_faster() -> None:
    points = [Point("attention", f"1x1x{length}x128", length**2, length**2 / 1e12) for length in (1024, 4096, 8192)]
    assert math.isclose(measured_device._half_length(points), 0, abs_tol=1e-6)


@pytest.fixture
def with_device(tmp_path: Path) -> dict[str, str]:
    """Environment variables with a command that lists a GPU."""
    lister = tmp_path / "nvidia-smi"
    lister.write_text('#!/bin/sh\necho "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)"\n')
    lister.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_the_cases_of_an_accelerator_are_listed_without_one(children: Children, with_device: dict[str, str]) -> None:
    words = ("calibrate", "--device", "cuda", "--only", "hardware", "--base", "h100", "--dry-run", "--json")
    done = children.python("-m", "distbench", *words, env=with_device)
    assert done.returncode == 0, done.stderr
    assert "compute/matmul_bf16/8192" in done.stdout and "calibrate_steps" not in done.stdout


def test_a_base_without_a_hardware_file_is_refused(children: Children, with_device: dict[str, str]) -> None:
    words = ("calibrate", "--device", "cuda", "--only", "profile", "--base", "h100", "--dry-run")
    done = children.python("-m", "distbench", *words, env=with_device)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--base has no effect" in done.stderr


def test_a_base_is_of_accelerators(children: Children, tmp_path: Path) -> None:
    done = children.python("-m", "distbench", "calibrate", "--device", "cpu", "--base", "h100", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "leave --base out" in done.stderr
    assert not [*tmp_path.iterdir()]
