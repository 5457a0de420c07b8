"""A simulation as text: the parts of the step, memory by owner, assumptions, and the answer at the end."""

from collections.abc import Callable, Sequence

from distbench.show import units
from distbench.show.blocks import Block, Heading, Lines, Notes, Table, TableColumns, capped, table_of
from distbench.show.units import brief_time_text, rate_text, size_text, source_text, time_text
from distbench.simulate.clock import HOST_LINK
from distbench.simulate.error_bars import Bar, has_class, no_class_text
from distbench.simulate.simulation import BUFFERED_SENDS, Simulation, by_mesh_dim, fullest, slowest
from distbench.spec.mesh import format_mesh
from distbench.spec.printable_text import count_text

MAX_ROWS = 8
LEAST_S = 1e-9  # smaller times are rounding errors
# Content of a block of memory, as shown to the reader.
CALLED = {
    "parameters": "parameters (this rank's shards)",
    "gradients": "gradients (this rank's shards)",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "batch": "batch",
    "cache": "cached keys and values",
    "fsdp": "gathered parameters and reductions of FSDP",
    "activations": "activations of",
    "backward": "of backward:",
    "other": "other",
}


def blocks_of(ranks: Sequence[Simulation]) -> list[Block]:
    """Return all tables of one simulated step: time of the slowest rank, memory of the fullest rank."""
    simulation, memory = slowest(ranks), fullest(ranks)
    return [
        Heading(f"{simulation.recording.head.label}, simulated on {simulation.hardware.name}"),
        Lines(_setting(simulation, memory, ranks)),
        *([_ranks(ranks)] if len(ranks) > 1 else []),
        _time(simulation),
        *_exposed(simulation),
        _memory(memory),
        Notes(assumptions(simulation)),
        Lines(_answer(simulation, memory)),
    ]


def _ranks(ranks: Sequence[Simulation]) -> Table:
    bubble = ("bubble", lambda simulation: _share(simulation.parts.bubble_s, simulation))
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
    notes = ["the step time is the time of the slowest rank; every other rank equals a rank of this table"]
    return table_of("ranks of the pipeline" if is_pipeline else "ranks that differ", columns, ranks, notes)


def _answer(simulation: Simulation, full: Simulation) -> tuple[str, ...]:
    """Return lines on step time, memory, and the largest exposed communication."""
    head, memory = simulation.recording.head, full.memory
    unit, shares = "tokens" if head.num_tokens else "samples", (simulation.model_share, simulation.hardware_share)
    mfu, hfu = (f"{100 * share:.1f} %" for share in shares)
    exposed = {key: seconds for key, seconds in simulation.exposed_s.items() if seconds > LEAST_S}
    largest = "none"
    if exposed:
        key, seconds = max(exposed.items(), key=lambda item: item[1])
        whose = f"{source_text(key.source)} {key.kind} ({key.mesh_dim}) of {key.owner or 'the root module'}"
        largest = f"{whose}, {brief_time_text(seconds)} ({_share(seconds, simulation)} of the step)"
    warnings = _memory_warning(full)
    return (
        f"Simulated: {brief_time_text(simulation.timed.step_s)} per step{_step_bar(simulation)} on "
        f"{simulation.hardware.name}, "
        f"{rate_text(simulation.tokens_per_s)} {unit}/s/device, MFU {mfu}, HFU {hfu}",
        f"Memory: {size_text(memory.reserved_bytes)}{_memory_bar(full)} of "
        f"{size_text(simulation.hardware['memory_bytes'])} reserved at the peak, "
        f"{size_text(memory.live_bytes)} of it alive" + ("" if warnings else "; the step fits"),
        f"Largest exposed communication: {largest}",
        *warnings,
        *([f"warning: {BUFFERED_SENDS}"] if simulation.timed.buffers_sends else []),
    )


def _step_bar(simulation: Simulation) -> str:
    bar = simulation.step_bar
    return "" if bar is None else f" {range_text(simulation.timed.step_s, bar, brief_time_text)}"


def _memory_bar(full: Simulation) -> str:
    bar = full.memory_bar
    return "" if bar is None else f" {range_text(full.memory.reserved_bytes, bar, size_text)}"


def range_text(value: float, bar: Bar, text_of: Callable[[float], str]) -> str:
    """Return the range of an error bar, such as `(2.01 to 2.51 s)`."""
    low, high = text_of(value * bar.low), text_of(value * bar.high)
    unit = high.rpartition(" ")[2]
    return f"({low.removesuffix(f' {unit}')} to {high})"


def _setting(simulation: Simulation, full: Simulation, ranks: Sequence[Simulation]) -> tuple[str, ...]:
    """Return lines on mesh, size of the model and the batch, and the simulated ranks."""
    head = simulation.recording.head
    world_size, per_node = simulation.recording.world_size, simulation.hardware.devices_per_node
    nodes = f"{count_text(-(-world_size // per_node), 'node')} of {per_node}" if world_size > per_node else "1 node"
    full_rank = f"{full.recording.head.rank:,}"
    sentences = [
        f"mesh {format_mesh(head.mesh)} ({count_text(world_size, 'device')}, {nodes}): "
        f"{units.short_count_text(head.num_parameters)} parameters, global batch {head.batch_size:,}",
    ]
    sentences += [f"assumed: {text}" for text in head.assumed]
    if (pipeline := head.pipeline) is not None:
        shares = [of_rank.parts.bubble_s / of_rank.timed.step_s for of_rank in ranks]
        parts = count_text(pipeline.microbatches, "micro-batch", "micro-batches")
        least = f"; {100 * least:.1f} % with stages of equal time" if (least := pipeline.least_idle_share) else ""
        sentences.append(
            f"{pipeline.schedule} of {count_text(pipeline.num_stages, 'stage')} and {parts}: bubbles are "
            f"{100 * sum(shares) / len(shares):.1f} % of the step per rank{least}; rank {full_rank} needs most memory"
        )
    elif len(ranks) > 1 or head.rank:
        listed = ", ".join(f"{of_rank.recording.head.rank:,}" for of_rank in ranks)
        sentences.append(f"simulated ranks {listed}: {head.rank:,} is the slowest, and {full_rank} needs most memory")
    return tuple(sentences)


def _memory_warning(simulation: Simulation) -> list[str]:
    """Return a warning if the step does not fit or barely fits; [] if it fits."""
    capacity, memory = size_text(simulation.hardware["memory_bytes"]), simulation.memory_here
    if memory.out_of_memory is not None:
        missing = size_text(memory.out_of_memory)
        return [
            f"warning: out of memory, because the step does not fit into {capacity}; an allocation of {missing} fails"
        ]
    if memory.num_retries:
        times = "once" if memory.num_retries == 1 else f"{memory.num_retries} times"
        return [f"warning: the step fits into {capacity} only because the allocator frees its cache {times}"]
    if memory.reserved_bytes > simulation.hardware.usable_bytes:
        reserve = size_text(simulation.hardware["reserve_bytes"])
        left = f"leaves less than {reserve} for the context, NCCL's buffers and workspaces"
        return [f"warning: the step fits into {capacity}, but {left}"]
    return []


def _time(simulation: Simulation) -> Table:
    parts, head = simulation.parts, simulation.recording.head
    # A group of one rank communicates nothing.
    communication_s = {name: seconds for name, seconds in parts.communication_s.items() if seconds > LEAST_S}
    exposed = [
        ("exposed copies from and to the host" if name == HOST_LINK else f"exposed communication over {name}", seconds)
        for name, seconds in by_mesh_dim(simulation.exposed_s).items()
        if name in communication_s
    ]
    bubble = [("bubble (waits for another stage)", parts.bubble_s)] if head.pipeline is not None else []
    on_host = [("operators on the host", parts.on_host_s)] if parts.on_host_s else []
    rows = [
        ("compute", parts.compute_s),
        *exposed,
        *bubble,
        *on_host,
        ("idle (host-bound)", max(parts.idle_s, 0.0)),
    ]
    names = {"memory": "memory-bound", "attention_backward": "attention's backward"}
    kinds = ", ".join(
        f"{names.get(kind, kind)} {brief_time_text(seconds)}" for kind, seconds in parts.by_kind_s.items()
    )
    copies_s = communication_s.pop(HOST_LINK, 0.0)
    moved = ", ".join(f"over {name} {brief_time_text(seconds)}" for name, seconds in communication_s.items())
    notes = [
        f"operators, on all streams: {kinds}",
        f"collectives, exposed or not: {moved or 'none'}",
        *([f"copies from and to the host, exposed or not: {brief_time_text(copies_s)}"] if copies_s else []),
        f"CPU launch time: {brief_time_text(simulation.timed.host_s)}",
    ]
    of = f", rank {head.rank:,}" if head.pipeline is not None else ""
    cells = [(name, time_text(seconds), _share(seconds, simulation)) for name, seconds in rows]
    return Table(f"where the time goes{of}", ("<part of the step", "time", "of the step"), cells, notes)


def _exposed(simulation: Simulation) -> list[Block]:
    ranked = sorted(simulation.exposed_s.items(), key=lambda item: -item[1])
    rows = [
        (key.mesh_dim, key.kind, key.source, key.owner or "(root)", time_text(seconds), _share(seconds, simulation))
        for key, seconds in ranked[:MAX_ROWS]
        if seconds > LEAST_S
    ]
    if not rows:
        return []
    columns = ("<mesh dim", "<collective", "<source", "<owner", "exposed", "of the step")
    notes = [f"... {len(ranked) - MAX_ROWS} more: --format json"] if len(ranked) > MAX_ROWS else []
    return [Table("exposed communication by owner", columns, rows, notes)]


def _share(seconds: float, simulation: Simulation) -> str:
    return f"{100 * seconds / simulation.timed.step_s:.1f} %"


def _memory(simulation: Simulation) -> Table:
    rows = []
    for (kind, owner), num_bytes in sorted(simulation.alive.items(), key=lambda item: -item[1]):
        of = f" {owner or 'the root and the loss'}" if kind in ("activations", "backward") else ""
        rows.append((CALLED[kind] + of, size_text(num_bytes)))
    memory = simulation.memory
    mode = "expandable_segments:True" if simulation.expandable else "its default settings"
    note = (
        f"the allocator, with {mode}, rounds this up to {size_text(memory.allocated_bytes)} and reserves "
        f"{size_text(memory.reserved_bytes)}, because streams share no pool and free blocks may be too small"
    )
    return capped(Table("alive at the peak", ("<what", "bytes"), rows, [note]), MAX_ROWS + 4, "more: --format json")


def bar_notes(simulation: Simulation) -> tuple[str, ...]:
    """Return sentences on the rows that error bars are from, and on a machine without such rows."""
    hardware, bar = simulation.hardware, simulation.step_bar
    if hardware.host is not None:
        return ("no error bar, because the record of published steps has accelerators only",)
    if bar is None:
        return ("no error bar, because no residuals of published steps are installed",)
    rows = count_text(bar.num_rows, "held-out published row")
    sources = count_text(bar.num_sources, "source")
    bars = f"ranges in parentheses contain 90 % of runs comparable with {rows} of {sources} ({bar.of})"
    return (bars, *(() if has_class(hardware) else (no_class_text(hardware),)))


def assumptions(simulation: Simulation) -> tuple[str, ...]:
    """Return the guessed, fitted, extrapolated and missing figures."""
    hardware = simulation.hardware
    sentences: list[str] = []
    for basis, verb in (("guess", "guessed"), ("fitted", "fitted")):
        if figures := hardware.of_basis(basis):
            sentences.append(f"{verb} in hardware file {hardware.name}: {', '.join(sorted(figures))}")
    if simulation.extrapolated:
        taken = ", ".join(f"{name} ({instead})" for name, instead in sorted(simulation.extrapolated.items()))
        sentences.append(f"not in hardware file {hardware.name}, and extrapolated: {taken}")
    if simulation.recording.head.compiled:
        sentences.append(
            "torch.compile is modelled by rules: memory-bound operators between two matmuls are one kernel, and "
            "tensors that backward does not need are freed"
        )
    sentences += [f"assumed: {text}" for text in simulation.recording.head.assumed]
    if layers := simulation.recording.head.recorded_layers:
        sentences.append(f"{layers} layers were recorded, and the other layers, which are equal, repeat their events")
    return (*sentences, *bar_notes(simulation), *simulation.not_simulated)
