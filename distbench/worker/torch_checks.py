"""Checks of this version of torch: features by name and by behaviour."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distbench.cases.redistribution import redistribution_cases
from distbench.cases.step import step_cases
from distbench.observe.trace import StepTrace
from distbench.planning.cost_profile import COLLECTIVES, Line, Profile
from distbench.ranks.device import Accelerator, nccl_version
from distbench.ranks.failure import one_line
from distbench.ranks.measure import no_stamp
from distbench.simulate.recorded_step import recorded
from distbench.spec import FsdpPlan, ParallelPlan, PipelinePlan, Redistributions, Scenario
from distbench.spec.devices import ACCELERATORS, built_for, known_device
from distbench.spec.placements import PLANNERS
from distbench.spec.versions import OLDEST, SUPPORTED, outside_of_support, release
from distbench.torch_private import fake_ranks, needs_newer, probe
from distbench.worker.plan_rehearsal import rank_of


def checks(_: None = None) -> list[dict[str, Any]]:
    """Return each check as name, ok, found and advice; for private names of torch, also the feature that uses the
    name."""
    version, outside = torch.__version__, outside_of_support(torch.__version__)
    distributed = dist.is_available()
    rows = [
        # A newer torch only gives a warning; the rows below show missing features.
        _row("torch version", not outside, version, outside)
        | ({} if release(version) < OLDEST else {"mark": "warning"}),
        _row("torch.distributed", distributed, str(distributed), "install torch built with distributed"),
        _row("gloo", distributed and dist.is_gloo_available(), "CPU backend", "install torch built with gloo"),
        *accelerator_checks(),
    ]
    for probed in probe():
        internal = probed.internal
        too_old = needs_newer(internal.feature)
        advice = f"cases that need {internal.feature} are reported as unsupported"
        row = _row(
            internal.name,
            probed.missing is None,
            probed.missing or internal.feature,
            advice if too_old else f"{advice}; use {SUPPORTED}",
        )
        rows.append(row | {"feature": internal.feature} | ({"mark": "TOO OLD"} if too_old else {}))
    return rows


def accelerator_checks() -> list[dict[str, Any]]:
    """Return checks of the first available type of ACCELERATORS and of torch's other device types, each with its
    backend.
    """
    all_rows = []
    for place, name in enumerate(ACCELERATORS):
        used = Accelerator(name)
        if place and not used.is_available:
            continue
        backend, platform = used.backend, used.platform.upper()
        devices = f"{used.num_devices} x {_name_of(used)}, {platform} {used.version}" if used.is_available else ""
        has_backend = dist.is_available() and dist.is_backend_available(backend)
        version = nccl_version() if has_backend and backend == known_device(ACCELERATORS[0]).backend else None
        build = platform if used.is_available else built_for(name)
        advice = f"to measure GPUs, install torch built for {build} and its driver"
        backend_text = f"{platform} backend{f', version {version}' if version else ''}"
        rows = [
            _row(platform, used.is_available, devices or f"no {platform} device", advice),
            _row(backend.upper(), has_backend, backend_text, advice),
        ]
        all_rows += [row | {"device": name} for row in rows]
    return all_rows


def _name_of(used: Accelerator) -> str:
    """Return the name of the type's first device, or the error of the query."""
    try:
        return used.name_of(0)
    except RuntimeError as error:
        return f"devices that do not respond ({one_line(error)})"


def _row(name: str, ok: bool, state: str, advice: str) -> dict[str, Any]:
    return {"name": name, "ok": bool(ok), "found": state, "advice": advice}


MESH = {"dp_shard": 2, "tp": 2}
SIZE = 8
# Calibrated planning and the direct exchange need a profile, but its figures do not matter here.
PROFILE = Profile(
    *("made up", "gloo", torch.__version__, MESH),
    tuple(Line(op, name, size, 1e-3, 1e-9) for op in COLLECTIVES for name, size in MESH.items()),
)


class TwoLayers(nn.Module):
    """A model of two linear layers, which are FSDP units or stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both layers, one after the other."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _step(plan: ParallelPlan) -> Scenario:
    return Scenario(
        build_model=TwoLayers,
        make_batch=lambda: (torch.zeros(4, SIZE), torch.zeros(4, SIZE)),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        plan=plan,
    )


FSDP = _step(ParallelPlan(fsdp=FsdpPlan(wrap=("layers.*",))))
PIPELINE = _step(ParallelPlan(pipeline=PipelinePlan("1f1b"), microbatches=2))


def trace_a_step() -> None:
    """Check that each unit of FSDP2 gathers its parameters and reduces their gradients in a traced step."""
    with fake_ranks({"dp_shard": 2}) as mesh:
        (case_spec,) = step_cases(FSDP, "doctor", rank_of(mesh, seed=0))
        with case_spec.open() as opened_case:
            assert isinstance(opened_case.trace, StepTrace)
            [traced] = opened_case.trace.timed(1)
    collectives = {(row.what.kind, row.what.owner) for row in traced.rows}
    units = ("layers.0", "layers.1")
    if missing := {*product(("all_gather", "reduce_scatter"), units)} - collectives:
        kind, owner = min(missing)
        raise RuntimeError(f"the trace has no {kind} of {owner}")


def simulate(scenario: Scenario, mesh: dict[str, int]) -> None:
    """Record a step on the simulated device, with collectives or messages."""
    if not recorded(scenario, "doctor", "", mesh).recording.collectives:
        raise RuntimeError("no collective was recorded")


def redistribute(planner: str) -> None:
    """Redistribute a tensor from rows to columns with a planner."""
    pair = (("R", "S(0)"), ("R", "S(1)"))
    scenario = Scenario(redistributions=(Redistributions((SIZE, SIZE), (pair,), planners=(planner,)),))
    with fake_ranks(MESH) as mesh:
        (case_spec,) = redistribution_cases(scenario, replace(rank_of(mesh, seed=0), profile=PROFILE))
        with case_spec.open() as opened_case:
            moved: Any = opened_case.call(no_stamp)
    shape = tuple((moved.to_local() if hasattr(moved, "to_local") else moved).shape)
    if shape != (SIZE, SIZE // MESH["tp"]):
        raise RuntimeError(f"the result's local shape is {shape}")


FEATURES: dict[str, Callable[[], None]] = {
    # Simulations run first, because the simulated device must be registered before autograd's first backward.
    "simulated FSDP2 steps (simulate, sweep --hardware)": partial(simulate, FSDP, {"dp_shard": 2}),
    "simulated pipelines": partial(simulate, PIPELINE, {"pp": 2}),
    "tracing (run --trace-paths)": trace_a_step,
    **{f"redistribution by {name}": partial(redistribute, name) for name in PLANNERS},
}


def behaviour(_: None = None) -> list[dict[str, str | None]]:
    """Try every feature; return {"feature": name, "failed": the error or None} for each feature."""
    rows: list[dict[str, str | None]] = []
    for feature, attempt in FEATURES.items():
        failed = None
        try:
            attempt()
        except Exception as error:
            traceback.print_exc()
            failed = one_line(error)
        rows.append({"feature": feature, "failed": failed})
    return rows
