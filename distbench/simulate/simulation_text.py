"""A simulation as a person reads it: the step's time and its parts, memory and what is alive, what was assumed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distbench.show import units
from distbench.show.blocks import Block, Heading, Lines, Table, TableColumns, capped, table_of
from distbench.show.units import brief_time_text, rate_text, size_text, time_text
from distbench.simulate.clock import Exposed
from distbench.simulate.replay import Simulation, by_mesh_dim, fullest, slowest
from distbench.spec.mesh import format_mesh
from distbench.spec.printable_text import count_text

MAX_ROWS = 8
LEAST_S = 1e-9  # below it is what floating point leaves over
# What lies in a block of memory, as a reader calls it.
CALLED = {
    "parameters": "parameters (this rank's shards)",
    "gradients": "gradients (this rank's shards)",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "batch": "batch",
    "cache": "keys and values that are kept",
    "fsdp": "gathered parameters and reductions of FSDP",
    "activations": "activations of",
    "backward": "of backward:",
    "other": "other",
}


class _Part(NamedTuple):
    name: str
    seconds: float
    of: float


PARTS: TableColumns = (
    ("<part of the step", lambda part: part.name),
    ("time", lambda part: time_text(part.seconds)),
    ("of the step", lambda part: _share(part.seconds, part.of)),
)


def blocks_of(ranks: Sequence[Simulation]) -> list[Block]:
    """Everything about one simulated step, given as the ranks that were simulated: of the slowest one its time, of the
    fullest one its memory."""
    simulation, memory = slowest(ranks), fullest(ranks)
    title = f"{simulation.recording.head.label}, simulated on {simulation.hardware.name}"
    return [
        Heading(title),
        Lines(_sentences(simulation, memory, ranks)),
        *([_ranks(ranks)] if len(ranks) > 1 else []),
        _time(simulation),
        *_exposed(simulation.exposed_s, simulation.timed.step_s),
        _memory(memory),
        Lines(assumptions(simulation)),
    ]


def _ranks(ranks: Sequence[Simulation]) -> Table:
    """Ranks that differ, side by side."""
    bubble = ("bubble", lambda simulation: _share(simulation.parts.bubble_s, simulation.timed.step_s))
    is_pipeline = ranks[0].recording.head.pipeline is not None
    columns: TableColumns = (
        ("rank", lambda simulation: f"{simulation.recording.head.rank:,}"),
        ("step", lambda simulation: time_text(simulation.timed.step_s)),
        ("compute", lambda simulation: time_text(simulation.parts.compute_s)),
        ("exposed", lambda simulation: time_text(sum(simulation.parts.exposed_s.values()))),
        *([bubble] if is_pipeline else []),
        ("reserved", lambda simulation: size_text(simulation.memory.reserved_bytes)),
        ("alive", lambda simulation: size_text(simulation.memory.live_bytes)),
    )
    notes = ["a step takes what its slowest rank takes; all other ranks are like one of these"]
    return table_of("ranks of the pipeline" if is_pipeline else "ranks that differ", columns, ranks, notes)


def _sentences(simulation: Simulation, full: Simulation, ranks: Sequence[Simulation]) -> tuple[str, ...]:
    head, memory = simulation.recording.head, full.memory
    unit = "tokens" if head.num_tokens else "samples"
    first = (
        f"step {brief_time_text(simulation.timed.step_s)}: {rate_text(simulation.tokens_per_s)} {unit}/s a device, "
        f"MFU {100 * simulation.model_share:.1f} %, HFU {100 * simulation.hardware_share:.1f} %"
    )
    second = (
        f"memory: {size_text(memory.reserved_bytes)} reserved at the peak, {size_text(memory.live_bytes)} of it alive; "
        f"{_fits(full)}"
    )
    where = (
        f"mesh {format_mesh(head.mesh)} ({count_text(simulation.recording.world_size, 'device')}, {_nodes(simulation)})"
    )
    who: tuple[str, ...] = ()
    if len(ranks) > 1 or head.rank:
        listed = ", ".join(f"{of_rank.recording.head.rank:,}" for of_rank in ranks)
        who = (f"of rank {listed}: the slowest is {head.rank:,}, the fullest {full.recording.head.rank:,}",)
    if head.pipeline is not None:
        who = (_of_pipeline(ranks, full),)
    size = units.count_text(head.num_parameters)
    about = f"{where}: {size} parameters, a batch of {head.batch_size:,}"
    return (first, second, about, *who)


def _of_pipeline(ranks: Sequence[Simulation], full: Simulation) -> str:
    pipeline = ranks[0].recording.head.pipeline
    assert pipeline is not None
    shares = [simulation.parts.bubble_s / simulation.timed.step_s for simulation in ranks]
    parts = count_text(pipeline.microbatches, "micro-batch", "micro-batches")
    stages = f"{pipeline.schedule} of {count_text(pipeline.num_stages, 'stage')} and {parts}"
    least = f"; {100 * least:.1f} % where stages take as long" if (least := pipeline.least_idle_share) else ""
    bubbles = f"bubbles are {100 * sum(shares) / len(shares):.1f} % of the step on a rank{least}"
    return f"{stages}: {bubbles}; the fullest rank is {full.recording.head.rank:,}"


def _nodes(simulation: Simulation) -> str:
    count = -(-simulation.recording.world_size // simulation.hardware.devices_per_node)
    return f"{count_text(count, 'node')} of {simulation.hardware.devices_per_node}" if count > 1 else "1 node"


def _fits(simulation: Simulation) -> str:
    capacity = size_text(simulation.hardware["memory_bytes"])
    memory = simulation.memory_here
    if memory.out_of_memory is not None:
        return f"out of memory: within {capacity} there is no room for {size_text(memory.out_of_memory)} more"
    if memory.num_retries:
        times = "once" if memory.num_retries == 1 else f"{memory.num_retries} times"
        return f"it fits into {capacity} only because the allocator gives back {times} what it cached"
    if memory.reserved_bytes > simulation.hardware.usable_bytes:
        reserve = size_text(simulation.hardware["reserve_bytes"])
        return f"it fits into {capacity}, but leaves less than {reserve} for the context, NCCL's buffers and workspaces"
    return f"it fits into {capacity}"


def _time(simulation: Simulation) -> Table:
    parts, step_s = simulation.parts, simulation.timed.step_s
    dims = by_mesh_dim(simulation.exposed_s)
    # A group of one rank moves nothing.
    communication_s = {name: seconds for name, seconds in parts.communication_s.items() if seconds > LEAST_S}
    rows = [
        _Part("compute: some operator runs", parts.compute_s, step_s),
        *(_Part(f"exposed communication over {name}", dims[name], step_s) for name in dims if name in communication_s),
        _Part("idle: the host has issued nothing yet", max(parts.idle_s, 0.0), step_s),
    ]
    if simulation.recording.head.pipeline is not None:
        rows.insert(-1, _Part("bubble: another stage is waited for", parts.bubble_s, step_s))
    kinds = ", ".join(f"{_kind(kind)} {brief_time_text(seconds)}" for kind, seconds in parts.by_kind_s.items())
    moved = ", ".join(f"over {name} {brief_time_text(seconds)}" for name, seconds in communication_s.items())
    notes = [
        f"operators, on all streams: {kinds}",
        f"collectives, exposed or not: {moved or 'none'}",
        f"the host issues for {brief_time_text(simulation.timed.host_s)} of the step",
    ]
    of = f", rank {simulation.recording.head.rank:,}" if simulation.recording.head.pipeline is not None else ""
    return table_of(f"where the time goes{of}", PARTS, rows, notes)


def _kind(kind: str) -> str:
    return {"memory": "memory-bound", "attention_backward": "attention's backward"}.get(kind, kind)


def _exposed(exposed: Mapping[Exposed, float], step_s: float) -> list[Block]:
    ranked = sorted(exposed.items(), key=lambda item: -item[1])
    rows = [
        (
            key.mesh_dim,
            key.kind,
            key.source,
            key.owner or "(root)",
            time_text(seconds),
            f"{100 * seconds / step_s:.1f} %",
        )
        for key, seconds in ranked[:MAX_ROWS]
        if seconds > LEAST_S
    ]
    if not rows:
        return []
    columns = ("<mesh dim", "<collective", "<source", "<owner", "exposed", "of the step")
    notes = [f"... {len(ranked) - MAX_ROWS} more: --format json"] if len(ranked) > MAX_ROWS else []
    return [Table("exposed communication by owner", columns, rows, notes)]


def _share(seconds: float, step_s: float) -> str:
    return f"{100 * seconds / step_s:.1f} %"


def _memory(simulation: Simulation) -> Table:
    ranked = sorted(simulation.alive.items(), key=lambda item: -item[1])
    rows = [(_held(kind, owner), size_text(num_bytes)) for (kind, owner), num_bytes in ranked]
    memory = simulation.memory
    mode = "expandable_segments:True" if simulation.expandable else "its default settings"
    note = (
        f"the allocator, with {mode}, rounds that up to {size_text(memory.allocated_bytes)} and reserves "
        f"{size_text(memory.reserved_bytes)} for it: pools of different streams share nothing, and free blocks may be "
        "too small"
    )
    return capped(Table("alive at the peak", ("<what", "bytes"), rows, [note]), MAX_ROWS + 4, "more: --format json")


def _held(held: str, owner: str) -> str:
    if held not in ("activations", "backward"):
        return CALLED[held]
    return f"{CALLED[held]} {owner or 'the root and the loss'}"


def assumptions(simulation: Simulation) -> tuple[str, ...]:
    """What a reader must know of the figures: what was guessed, fitted, and left out."""
    hardware = simulation.hardware
    sentences: list[str] = []
    for basis, verb in (("guess", "guessed"), ("fitted", "fitted")):
        if names := _listed(sorted(hardware.of_basis(basis))):
            sentences.append(f"{verb} in hardware file {hardware.name}: {names}")
    if hardware.extrapolated:
        figures = ", ".join(f"{name} ({instead})" for name, instead in sorted(hardware.extrapolated.items()))
        sentences.append(f"not in hardware file {hardware.name}, and extrapolated: {figures}")
    if simulation.recording.head.compiled:
        sentences.append(
            "torch.compile is a rule here: memory-bound operators between two matmuls are one kernel; what backward "
            "does not need is not kept"
        )
    return (*sentences, *simulation.not_simulated)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
