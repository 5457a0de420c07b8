"""A recording on a machine: the step's time and memory, and the assumptions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from distbench.simulate.allocator import MemoryUse, replay_memory
from distbench.simulate.async_tp import ASYNC_TP_RULE, in_async_tp
from distbench.simulate.clock import Exposed, Parts, TimedStep, parts_of, replay_together
from distbench.simulate.compile_float8 import FLOAT8_RULE, compiled_memory, in_compiled_loss, in_float8_by
from distbench.simulate.error_bars import Bar, Traits, bar_range, memory_bar, time_bar, traits_of
from distbench.simulate.hardware_file import Hardware
from distbench.simulate.operator_costs import host_assumptions
from distbench.simulate.recording import COPIES, ON_HOST, SCHEDULE, Operator, Recording, ranks_of_pipeline
from distbench.spec.plan import LOSS, folded

NOT_SIMULATED = (
    "each rank is simulated alone, at the speed of the slowest device, and does not wait for other ranks within the "
    "step",
    "kernels and collectives that run at the same time slow each other down by one factor, overlap_slowdown",
    "memory outside of torch's allocator is not counted (the device's context, NCCL's buffers, libraries' workspaces)",
)
IN_PIPELINES = (
    "ranks of a pipeline wait for one another's messages; each rank is as fast as the slowest device, and its other "
    "collectives do not wait for other ranks"
)
BUFFERED_SENDS = (
    "sends of this step wait for receives that are queued behind other sends of the same two ranks; they are simulated "
    "as buffered by NCCL, and a send that is too large for NCCL's buffers would hang"
)
OFFLOADED = (
    "copies between host and device run at copy_bytes_per_s, one at a time per direction, next to kernels and "
    "collectives; operators on the host run one after another at host_bytes_per_s, and host memory is not counted"
)
NOT_ON_HOST = (
    "the host runs operators and collectives sequentially, with times that were measured while all ranks ran them",
    NOT_SIMULATED[0],
    "memory follows the rules of an accelerator's allocator, while a CPU's allocator has other rules",
)


@dataclass(frozen=True)
class SimulatedRanks:
    """All ranks of a pipeline, or a single rank, on one machine."""

    recordings: Sequence[Recording]
    hardware: Hardware

    @cached_property
    def timed(self) -> dict[int, TimedStep]:
        """Each rank's step. Raises the errors of `replay_together`."""
        steps = replay_together(self.recordings, self.hardware)
        return {recording.head.rank: timed for recording, timed in zip(self.recordings, steps, strict=True)}


@dataclass(frozen=True)
class Simulation:
    """One recorded step on one machine.

    Args:
        expandable: whether the allocator runs with `expandable_segments:True`.
        float8: patterns of the modules that were changed to float8 in the recording.
        ranks: all ranks of the rank's pipeline; None for a single rank.
    """

    recording: Recording
    hardware: Hardware
    expandable: bool = False
    float8: tuple[str, ...] = ()
    ranks: SimulatedRanks | None = None

    @classmethod
    def all_of(
        cls, recordings: Sequence[Recording], hardware: Hardware, expandable: bool, float8: tuple[str, ...]
    ) -> "list[Simulation]":
        """Return simulations of ranks and variants, matching modules in float8; a pipeline's ranks share a clock."""
        changed = [in_float8_by(recording, float8) if float8 else recording for recording in recordings]
        changed = [in_async_tp(recording) if recording.head.async_tp else recording for recording in changed]
        changed = [
            in_compiled_loss(recording) if LOSS in recording.head.compiled else recording for recording in changed
        ]
        together: dict[tuple[str, tuple[int, ...]], list[Recording]] = defaultdict(list)
        for recording in changed:
            together[_pipeline(recording)].append(recording)
        ranks = {pipeline: SimulatedRanks(of_ranks, hardware) for pipeline, of_ranks in together.items()}
        return [cls(recording, hardware, expandable, float8, ranks[_pipeline(recording)]) for recording in changed]

    @cached_property
    def timed(self) -> TimedStep:
        """Every operator and collective with its times."""
        return self._together.timed[self.recording.head.rank]

    @cached_property
    def parts(self) -> Parts:
        """The parts of the step's time."""
        return parts_of(self.timed)

    @cached_property
    def memory(self) -> MemoryUse:
        """Memory use without a limit."""
        return replay_memory(compiled_memory(self.recording), expandable=self.expandable)

    @cached_property
    def memory_here(self) -> MemoryUse:
        """Memory use within this machine's memory; equal to `memory` if the machine's memory suffices."""
        return self._memory_within(self.hardware["memory_bytes"])

    @cached_property
    def memory_usable(self) -> MemoryUse:
        """Memory use if the machine's reserve is left free."""
        return self._memory_within(self.hardware.usable_bytes)

    def _memory_within(self, capacity_bytes: float) -> MemoryUse:
        if self.memory.reserved_bytes <= capacity_bytes:
            return self.memory
        events = compiled_memory(self.recording)
        return replay_memory(events, expandable=self.expandable, capacity_bytes=int(capacity_bytes))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens (or samples, if the scenario sets no tokens) per second and device."""
        amount = self.recording.head.num_tokens or self.recording.head.batch_size
        return amount / self.timed.step_s / self.recording.world_size

    @property
    def model_share(self) -> float:
        """MFU: 3 times forward's operations (1 time without backward), relative to the device's bf16 peak.

        A pipeline's MFU is relative to the peaks of all its ranks. Causal attention counts half; recomputation
        does not count.
        """
        passes = 3 if {"backward", SCHEDULE} & {*self.recording.head.phases} else 1
        return self._share("forward", passes)

    @property
    def hardware_share(self) -> float:
        """HFU: all operations, including recomputation."""
        return self._share()

    @property
    def traits(self) -> Traits:
        """The class of the prediction, for its error bars."""
        head = self.recording.head
        return traits_of(self.hardware, head.mesh, bool(self.float8), bool({*head.compiled} - {LOSS}))

    @property
    def step_bar(self) -> Bar | None:
        """Error bar of the step time; None for a host, and without residuals."""
        return time_bar(self.traits) if self.hardware.host is None else None

    @property
    def memory_bar(self) -> Bar | None:
        """Error bar of reserved memory; None for a host, and without residuals."""
        return memory_bar(self.traits) if self.hardware.host is None else None

    @property
    def exposed_s(self) -> dict[Exposed, float]:
        """Exposed communication, summed over modules of one stack."""
        exposed: dict[Exposed, float] = defaultdict(float)
        for key, seconds in self.parts.exposed_s.items():
            exposed[key._replace(owner=folded(key.owner))] += seconds
        return dict(exposed)

    @property
    def alive(self) -> dict[tuple[str, str], int]:
        """Memory alive at the peak: (kind, owner for activations) to bytes, summed over modules of one stack."""
        alive: dict[tuple[str, str], int] = defaultdict(int)
        for (kind, owner), num_bytes in self.memory.alive.items():
            alive[kind, folded(owner) if kind in ("activations", "backward") else ""] += num_bytes
        return dict(alive)

    def to_record(self) -> dict[str, Any]:
        """Return all figures as plain data: s, bytes, fractions."""
        head, parts, memory = self.recording.head, self.parts, self.memory
        return {
            "simulated": True,
            "scenario": head.scenario,
            "variant": head.variant,
            "mesh": head.mesh,
            "rank": head.rank,
            "hardware": self.hardware.name,
            "step_s": self.timed.step_s,
            "step_range_s": bar_range(self.timed.step_s, self.step_bar),
            "compute_s": parts.compute_s,
            "idle_s": parts.idle_s,
            "bubble_s": parts.bubble_s,
            "on_host_s": parts.on_host_s,
            "host_s": self.timed.host_s,
            "by_kind_s": dict(parts.by_kind_s),
            "communication_s": dict(parts.communication_s),
            "exposed_s": [{**key._asdict(), "exposed_s": seconds} for key, seconds in self.exposed_s.items()],
            "tokens_per_s_per_device": self.tokens_per_s,
            "mfu": self.model_share,
            "hfu": self.hardware_share,
            "memory": {
                "peak_reserved_bytes": memory.reserved_bytes,
                "peak_reserved_range_bytes": bar_range(memory.reserved_bytes, self.memory_bar),
                "peak_allocated_bytes": memory.allocated_bytes,
                "peak_live_bytes": memory.live_bytes,
                "expandable_segments": self.expandable,
                "fits": self.memory_here.out_of_memory is None,
                "num_retries": self.memory_here.num_retries,
                "alive": [
                    {"held": kind, "owner": owner, "num_bytes": num_bytes}
                    for (kind, owner), num_bytes in self.alive.items()
                ],
            },
            "assumed": {name: asdict(figure) for name, figure in self.hardware.of_basis("guess", "fitted").items()},
            "extrapolated": self.extrapolated,
            "not_simulated": list(self.not_simulated),
            "assumed_values": list(self.recording.head.assumed),
        }

    @property
    def extrapolated(self) -> dict[str, str]:
        """Figures that the hardware file lacks and that the step needs, with their defaults."""
        kinds = {event.kind for event in self.recording.step if isinstance(event, Operator)}
        used = {"copy_bytes_per_s": bool(kinds & {*COPIES}), "host_bytes_per_s": ON_HOST in kinds}
        return {name: instead for name, instead in self.hardware.extrapolated.items() if used.get(name, True)}

    @property
    def not_simulated(self) -> tuple[str, ...]:
        """Caveats about the figures in addition to the assumptions."""
        host = self.hardware.host
        rules = [FLOAT8_RULE.format(patterns=", ".join(self.float8))] if self.float8 else []
        rules += [ASYNC_TP_RULE] if self.recording.head.async_tp else []
        rules += [OFFLOADED] if self.recording.offloads else []
        if self.recording.head.pipeline is not None:
            rules += [BUFFERED_SENDS] if self.timed.buffers_sends else []
            return (*rules, IN_PIPELINES, *NOT_SIMULATED[1:])
        return (*host_assumptions(self.recording, host), *NOT_ON_HOST) if host is not None else (*rules, *NOT_SIMULATED)

    @property
    def _together(self) -> SimulatedRanks:
        return self.ranks or SimulatedRanks([self.recording], self.hardware)

    def _share(self, phase: str | None = None, passes: int = 1) -> float:
        """Return the operations times `passes` relative to the bf16 peak; for a pipeline, the mean over ranks."""
        ranks = self._together.recordings
        operators = [event for recording in ranks for event in recording.step if isinstance(event, Operator)]
        flops = sum(operator.flops for operator in operators if phase in (None, operator.phase)) // len(ranks)
        return passes * flops / (self.timed.step_s * self.hardware["peak_bf16_flops"])


def _pipeline(recording: Recording) -> tuple[str, tuple[int, ...]]:
    """Return the variant and the ranks of a recording's pipeline; without a pipeline its own rank."""
    head = recording.head
    ranks = ranks_of_pipeline(head.mesh, head.pipeline.mesh_dim, head.rank) if head.pipeline else [head.rank]
    return head.label, tuple(ranks)


def by_mesh_dim(exposed: Mapping[Exposed, float]) -> dict[str, float]:
    """Return exposed seconds by mesh dim."""
    seconds_by_dim: dict[str, float] = defaultdict(float)
    for key, seconds in exposed.items():
        seconds_by_dim[key.mesh_dim] += seconds
    return dict(seconds_by_dim)


def slowest(simulations: Sequence[Simulation]) -> Simulation:
    """Return the rank whose step takes longest, the first of several; other ranks wait for this rank."""
    return max(simulations, key=lambda simulation: simulation.timed.step_s)


def fullest(simulations: Sequence[Simulation]) -> Simulation:
    """Return the rank that reserves most memory; of several, the rank with most live memory."""
    return max(simulations, key=lambda simulation: (simulation.memory.reserved_bytes, simulation.memory.live_bytes))


def steps_of(simulations: Sequence[Simulation]) -> list[list[Simulation]]:
    """Group simulations by step: the ranks of one variant."""
    by_label: dict[str, list[Simulation]] = {}
    for simulation in simulations:
        by_label.setdefault(simulation.recording.head.label, []).append(simulation)
    return list(by_label.values())
