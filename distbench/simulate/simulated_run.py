"""Simulated steps as a run file, in the format of measured runs. Each row has status `simulated` and no samples."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distbench.records.bus_bandwidth import wire_bytes
from distbench.records.machine import slug
from distbench.records.run_file import (
    COMPUTING_COLUMNS,
    PHASE_COLUMNS,
    SCHEMA_VERSION,
    SIMULATED,
    TRACE_COLUMNS,
    Record,
    append,
)
from distbench.simulate.clock import computing_of, exposed_spans
from distbench.simulate.recording import SCHEDULE, Collective, Head, Operator
from distbench.simulate.simulation import Simulation, by_mesh_dim, fullest, slowest, steps_of
from distbench.spec.errors import UserError
from distbench.spec.file_io import DAY_S, unique_stem

# Pauses between operators below this share of a step are not drawn.
LEAST_PAUSE = 1e-4
MAX_ALIVE = 24


def write_simulated_run(
    simulations: Sequence[Simulation], out: Path, environment: Mapping[str, Any], started_at: float, label: str = ""
) -> Path:
    """Write the steps of one scenario on one machine below a results folder; return the run file.

    Args:
        environment: environment of the simulation, such as commit and Python.
        started_at: start of the command, seconds since the epoch.

    Raises:
        UserError: the folder cannot be written, or a step takes longer than a run file supports.
    """
    longest_s = max(simulation.timed.step_s for simulation in simulations)
    if longest_s > DAY_S:
        raise UserError(
            f"the simulated step takes {longest_s:.3g} s, more than a day; check the hardware file and --mesh"
        )
    hardware, head = simulations[0].hardware, simulations[0].recording.head
    commit = str(environment.get("git_commit") or "nogit")[:8]
    run_id = unique_stem(started_at, commit, slug(head.scenario))
    machine = f"{SIMULATED}-{hardware.name}"
    path = out / slug(machine) / f"{run_id}.jsonl"
    of_steps = steps_of(simulations)
    header = _header(simulations, machine, run_id, environment, started_at, label)
    footer = {
        "type": "footer",
        "status": "complete",
        "finished_at": time.time(),
        "wall_s": max(time.time() - started_at, 0.0),
        "num_by_status": {"ok": len(of_steps)},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append(path, header, *map(_case, of_steps), *map(_trace, of_steps), footer)
    except OSError as error:
        raise UserError(f"--results {out} cannot be written ({error.strerror}); choose another folder") from error
    return path


def _header(
    simulations: Sequence[Simulation],
    machine: str,
    run_id: str,
    environment: Mapping[str, Any],
    started_at: float,
    label: str,
) -> Record:
    hardware, recording = simulations[0].hardware, simulations[0].recording
    head, figures = recording.head, {name: asdict(figure) for name, figure in hardware.figures.items()}
    return {
        "type": "run",
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "invocation_id": run_id,
        SIMULATED: {
            "hardware": {"name": hardware.name, "summary": hardware.summary, "figures": figures},
            "expandable_segments": simulations[0].expandable,
            "ranks": sorted({simulation.recording.head.rank for simulation in simulations}),
            **{basis: sorted(hardware.of_basis(basis)) for basis in ("guess", "fitted")},
            "extrapolated": simulations[0].extrapolated,
            "not_simulated": list(simulations[0].not_simulated),
            "assumed_values": list(head.assumed),
        },
        "job": {
            "scenario": head.scenario,
            "mesh": head.mesh,
            "device": SIMULATED,
            "settings": {},
            "variants": [step[0].recording.head.variant for step in steps_of(simulations)],
            "started_at": started_at,
            "label": label,
        },
        "environment": {
            **{name: environment.get(name) for name in ("git_commit", "git_dirty", "python", "platform")},
            "machine": machine,
            "device": SIMULATED,
            "device_name": hardware.name,
            "num_devices": min(hardware.devices_per_node, recording.world_size),
            "memory_bytes": int(hardware["memory_bytes"]),
            "world_size": recording.world_size,
            "num_hosts": -(-recording.world_size // hardware.devices_per_node),
            "torch": head.torch,
        },
    }


def _case(ranks: Sequence[Simulation]) -> Record:
    step, memory = slowest(ranks), fullest(ranks)
    head, parts, used = step.recording.head, step.parts, memory.memory
    phases: dict[str, float] = defaultdict(float)
    for phase, start, end in _phase_spans(step):
        phases[phase] += end - start
    by_kind: Counter[str] = Counter()
    for (kind, _), num_bytes in memory.alive.items():
        by_kind[kind] += num_bytes
    alive = sorted(memory.alive.items(), key=lambda item: -item[1])
    params: Record = {"scenario": head.scenario, "variant": head.variant, "batch_size": head.batch_size}
    params |= {} if head.num_tokens is None else {"num_tokens": head.num_tokens}
    return {
        "type": "case",
        SIMULATED: True,
        "case": {"id": _case_id(head), "kind": "step", "params": {**params, **head.params}},
        "status": "ok",
        "samples_s": [],
        "group_size": step.recording.world_size,
        "mesh_dim": "x".join(head.mesh),
        "counters": {
            "predicted_s": step.timed.step_s,
            "predicted_phases_s": phases,
            "compute_s": parts.compute_s,
            "exposed_s": sum(parts.exposed_s.values()),
            "exposed_by_mesh_dim_s": by_mesh_dim(parts.exposed_s),
            "idle_s": max(parts.idle_s, 0.0),
            **_bubbles(ranks),
            **({"on_host_s": parts.on_host_s} if parts.on_host_s else {}),
            "host_s": step.timed.host_s,
            "mfu": step.model_share,
            "hfu": step.hardware_share,
            "slowest_rank": head.rank,
            "peak_bytes": used.live_bytes,
            "peak_reserved_bytes": used.reserved_bytes,
            "peak_by_kind": dict(by_kind),
            "alive": [[kind, owner, num_bytes] for (kind, owner), num_bytes in alive[:MAX_ALIVE]],
            "fits": memory.memory_here.out_of_memory is None,
            "num_retries": memory.memory_here.num_retries,
        },
        "error": None,
    }


def _bubbles(ranks: Sequence[Simulation]) -> Record:
    """Return a pipeline's idle seconds on the first rank, and each rank's idle share of the step."""
    if (pipeline := ranks[0].recording.head.pipeline) is None:
        return {}
    return {
        "bubble_s": slowest(ranks).parts.bubble_s,
        "bubble_shares": [simulation.parts.bubble_s / simulation.timed.step_s for simulation in ranks],
        "least_idle_share": pipeline.least_idle_share,
    }


def _case_id(head: Head) -> str:
    """Return the case id of a measured run, which recordings of version 1 lack."""
    return head.case_id or f"step/{head.label}"


def _phase_spans(step: Simulation) -> list[tuple[str, float, float]]:
    """Return consecutive (phase, start, end), which make up the step.

    Phases of several micro-batches alternate. A phase ends with its last operator on the default stream.
    """
    is_pipeline = step.recording.head.pipeline is not None
    ends: list[tuple[str, float]] = []
    for span in step.timed.spans:
        if isinstance(span.what, Operator) and span.what.stream == 0:
            phase = SCHEDULE if is_pipeline and span.what.phase in ("forward", "backward") else span.what.phase
            if ends and ends[-1][0] == phase:
                ends.pop()
            ends.append((phase, span.end_s))
    if ends:
        ends[-1] = ends[-1][0], step.timed.step_s
    begins = [0.0, *(end for _, end in ends)]
    return [(phase, begin, end) for begin, (phase, end) in zip(begins, ends, strict=False)]


def _trace(ranks: Sequence[Simulation]) -> Record:
    """Return the trace of the simulated ranks, as in `observe.trace`."""
    head = ranks[0].recording.head
    pipeline = {}
    if head.pipeline is not None:
        pipeline = {"pipeline": {**asdict(head.pipeline), "bubble_shares": _bubbles(ranks)["bubble_shares"]}}
    phases = [[_rank(simulation), 0, *span] for simulation in ranks for span in _phase_spans(simulation)]
    computing = [[_rank(simulation), 0, *stretch] for simulation in ranks for stretch in _computing(simulation)]
    return {
        "type": "trace",
        SIMULATED: True,
        "case_id": _case_id(head),
        "method": f"a simulation on {ranks[0].hardware.name}",
        **pipeline,
        "clock_shared": True,
        "num_steps": 1,
        "steps_s": [slowest(ranks).timed.step_s],
        "phases": {"columns": PHASE_COLUMNS, "rows": phases},
        "computing": {"columns": COMPUTING_COLUMNS, "rows": computing},
        "columns": TRACE_COLUMNS,
        "rows": [row for simulation in ranks for row in _rows(simulation)],
    }


def _rank(step: Simulation) -> int:
    return step.recording.head.rank


def _computing(step: Simulation) -> list[tuple[float, float]]:
    """Return the times when operators run, without short pauses between them."""
    stretches: list[tuple[float, float]] = []
    for start, end in computing_of(step.timed):
        if stretches and start - stretches[-1][1] < LEAST_PAUSE * step.timed.step_s:
            stretches[-1] = stretches[-1][0], end
        else:
            stretches.append((start, end))
    return stretches


def _rows(step: Simulation) -> list[list[Any]]:
    """Return one row per collective, in the order of issue."""
    exposed_s = {id(span): seconds for span, seconds in exposed_spans(step.timed)}
    counts: Counter[str] = Counter()
    rows = []
    for span in step.timed.spans:
        if not isinstance(span.what, Collective):
            continue
        rank, peer = _rank(step), span.what.peer
        group = "+".join(f"{count}x{stride}" for count, stride in span.what.ranks)
        if peer is not None:  # sender and receiver
            group = f"{rank},{peer}" if span.what.kind == "send" else f"{peer},{rank}"
        values = {
            **span.what._asdict(),
            "op": span.what.op or span.what.kind,
            "rank": rank,
            "step": 0,
            "group": group,
            "seq": counts[group],
            "backend_op": span.what.kind,
            "wire_bytes": wire_bytes(span.what.kind, span.what.payload_bytes, span.what.group_size),
            "issued_s": span.start_s,
            "completed_s": span.end_s,
            "exposed_s": exposed_s[id(span)],
        }
        counts[group] += 1
        rows.append([values[name] for name in TRACE_COLUMNS])
    return rows
