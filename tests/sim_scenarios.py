"""`python sim_scenarios.py JOBS.json N NAME...`: jobs on the device without hardware, as a line of JSON.

Of the scenarios named, which have no model, cases: every Nth of what there are hundreds of, else a few. They go
through the worker's own code for accelerators: its clock, its memory, its way to start collectives. Time on the device
is what the fake clock below says: a microsecond a recorded event.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from benchmarks.dispatch_mode import by_dispatch_mode
from distbench.cases import redistribution
from distbench.observe import module_attribution
from distbench.observe.module_attribution import communications_of
from distbench.ranks import device as seam
from distbench.ranks.context import RankContext
from distbench.ranks.measure import DeviceStart, Meter, RankGroup
from distbench.simulate import recorded_step
from distbench.simulate.operator_recorder import DEVICE_TYPE, Recorder, SimEvent, SimModule
from distbench.spec import Job, ParallelPlan, Settings, UserError
from distbench.torch_private import (
    NeedsValues,
    ShapesOnly,
    Skipped,
    fake_ranks,
    fake_tensors,
    meshes_with_values,
    native_all_to_all,
    simulated_device,
)
from distbench.worker.child_verbs import signature
from distbench.worker.rank_session import all_cases, load_scenario, variant_label

EVENT_MS = 1e-3
MANY = 300
ASKED: list[str] = []
# Of these a signature on a CPU has all-gathers for DTensor's all-to-alls.
EXCHANGED = ("shard_params",)


class TimedEvent(SimEvent):
    """Events have numbers, given as they are recorded: as good as moments."""

    def elapsed_time(self, other: SimEvent) -> float:
        assert self.number is not None and other.number is not None
        return (other.number - self.number) * EVENT_MS


class Module(SimModule):
    """The simulated device with a clock, memory and a name; ASKED is what it was asked for."""

    Event = TimedEvent

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("_") or name not in (
            *("empty_cache", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"),
        ):
            raise AttributeError(name)

        def act(*_: object) -> int:
            ASKED.append(name)
            return 4096

        return act

    def synchronize(self, device: Any = None) -> None:
        ASKED.append("synchronize")
        super().synchronize(device)

    def get_device_name(self, device: Any = None) -> str:
        return "no hardware"


class OneRank(RankGroup):
    """The fake group moves nothing: what this rank has is what all have."""

    def gather(self, stamps: torch.Tensor) -> torch.Tensor:
        return torch.stack([stamps, stamps])


class OneOfRanks(RankContext):
    """Likewise."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.mesh.size()


class StartOnShapes:
    """A start of devices together, on tensors without values."""

    def __init__(self, start: DeviceStart, on: Callable[[], Any]) -> None:
        self.num_started, self.took, self._start, self._on = 0, start.took, start, on

    def __call__(self) -> None:
        self.num_started += 1
        with self._on():
            self._start()


def measured(call: Any, device: torch.device, on: Callable[[], Any], starts_on: Any = None) -> dict[str, Any]:
    """A sample of a call, as the runner takes them."""

    def run(stamp: Any) -> None:
        with on():
            call(stamp)

    settings = Settings(min_samples=1, max_samples=1)
    meter = Meter(OneRank(dist.group.WORLD, device), seam.clock_of(device), settings, shared_clock=False)
    with on():
        meter = meter.started_on(starts_on)
    if meter.start is not None:
        meter = replace(meter, start=StartOnShapes(meter.start, on))  # type: ignore[arg-type]
    samples = meter.measure(run, getattr(call, "phases", ()), 0.01)
    result = {"samples_s": samples.samples_s, "phases": sorted(samples.phases_s), "isolated_s": samples.isolated_s}
    return result | ({"num_started": meter.start.num_started} if meter.start else {})  # type: ignore[attr-defined]


def of_steps(job: Job) -> dict[str, Any]:
    """Each variant's step: what it communicates and in which order it waits, then its time and memory by the seam."""
    function, result = load_scenario(Path(job.file), job.scenario), {}
    plain = recorded_step._run
    for variant in job.variants:
        label = variant_label(job, variant).partition("/")[2]
        facts: dict[str, Any] = {}

        def run(
            step: Any, context: RankContext, shapes: ShapesOnly, values: Any, recorder: Recorder, into: Any = facts
        ) -> None:
            plain(step, context, shapes, values, recorder)
            if result:
                return  # one variant of a scenario tells how the others are measured

            num_events, recorder.tracker = len(recorder.events), None

            @contextlib.contextmanager
            def on() -> Iterator[None]:
                with shapes.on(), values.on(), recorder.on(), meshes_with_values():
                    yield

            def timed(peak_stamp: Any) -> None:
                def call(stamp: Any) -> None:
                    step(lambda: (stamp(), peak_stamp()))

                call.phases = step.phases  # type: ignore[attr-defined]
                into.update(measured(call, context.device, on))

            ASKED.clear()
            left = seam.empty_allocator(context.device)
            into |= seam.allocator_peak(context.device, timed, step.phases) | {"left": left}
            into["asked"] = sorted(set(ASKED))
            del recorder.events[num_events:]

        recorded_step._run = run
        try:
            recorded = recorded_step.recorded(function(**variant), job.scenario, label, job.mesh)
        except UserError as error:
            result[label] = {"left_out": str(error)}
            continue
        finally:
            recorded_step._run = plain
        recording = recorded.recording
        events = [[type(event).__name__, *event] for event in recording.step]
        result[label] = {**facts, "events": events, "collectives": [one._asdict() for one in recording.collectives]}
    return result


def groups_with_values(meshes: Any, plain: Any = module_attribution.mesh_dims_by_ranks) -> Any:
    """The ranks of a mesh have values also where tensors have none."""
    with unset_fake_temporarily():
        return plain(meshes)


def planned_with_values(*given: Any, plain: Any = redistribution.exchange_between) -> Any:
    """Likewise where an exchange is planned, which makes no tensor."""
    with unset_fake_temporarily():
        return plain(*given)


def of_cases(job: Job, every: int) -> dict[str, Any]:
    """Some cases of a scenario without a model, opened and timed as the runner does."""
    function, result = load_scenario(Path(job.file), job.scenario), {}
    device, shapes = torch.device(DEVICE_TYPE, 0), ShapesOnly()

    @contextlib.contextmanager
    def on() -> Iterator[None]:
        with shapes.on(), meshes_with_values():
            yield

    with fake_ranks(job.mesh, DEVICE_TYPE) as mesh:
        assert dist.group.WORLD is not None
        context = OneOfRanks(0, device, mesh, seam.backend_of("cuda"), dist.group.WORLD, 0, check="none")
        cases = all_cases(job, function, context)
        for case_spec in cases if job.scenario == "collectives" else some_of(cases, every):
            with contextlib.ExitStack() as opened:
                try:
                    with on():
                        opened_case = opened.enter_context(case_spec.open())
                except (NeedsValues, Skipped) as error:
                    result[case_spec.case.id] = {"left_out": str(error)}
                    continue
                try:
                    facts = measured(opened_case.call, device, on, opened_case.starts_on)
                except Exception as error:  # the laboratory has what torch gets wrong
                    result[case_spec.case.id] = {"left_out": str(error)}
                    continue
                # Collectives of fake tensors are operators only.
                with on(), by_dispatch_mode():
                    rows = communications_of(opened_case.call, opened_case.phases, ParallelPlan(), context)
            result[case_spec.case.id] = {**facts, "collectives": [asdict(row) for row in rows]}
    return result


def some_of(cases: list[Any], every: int) -> list[Any]:
    """Every so many of hundreds; else, of those of one operation, one."""
    if len(cases) >= MANY or every == 1:
        return cases[::every]
    return list({one.case.params.get("op", one.case.params.get("what")): one for one in cases}.values())


def exchanged_on_cpu(job: Job) -> dict[str, Any]:
    """What each case communicates on a CPU where DTensor exchanges as it does on accelerators."""
    with contextlib.redirect_stdout(sys.stderr), native_all_to_all():
        return {case: one["paths"] for case, one in signature(job)["cases"].items()}


def main(jobs: Path, every: int, without_steps: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    given = [Job.from_record(record) for record in json.loads(jobs.read_text())]
    # For an accelerator's own kernel of RMSNorm DTensor chooses other shardings than for its parts, as a CPU has it.
    fake_tensors.OWN_KERNELS = ()
    simulated_device(DEVICE_TYPE, Module())
    module_attribution.mesh_dims_by_ranks = groups_with_values
    redistribution.exchange_between = planned_with_values
    device = seam.select_device(DEVICE_TYPE)
    result: dict[str, Any] = {"facts": seam.device_facts(device), "current": seam.Accelerator.current().type}  # type: ignore[union-attr]
    with contextlib.redirect_stdout(sys.stderr):
        for job in given:
            try:
                if job.scenario in without_steps:
                    result[job.scenario] = of_cases(job, every)
                else:
                    result[job.scenario] = of_steps(job)
            except Exception:
                result[job.scenario] = {"failed": traceback.format_exc()}
    result["on_cpu"] = {job.scenario: exchanged_on_cpu(job) for job in given if job.scenario in EXCHANGED}
    print(json.dumps(result, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]))
