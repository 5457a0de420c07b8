"""Simulated steps: what was predicted, on which hardware file, and what a step would hold. None of it was measured."""

from collections.abc import Iterator, Sequence
from typing import Any

from distbench.records.run_file import SIMULATED, Run, guesses_text
from distbench.report.section_protocol import ReportedRun, Section
from distbench.show.blocks import Table, TableColumns, capped, table_of
from distbench.show.units import NOTHING, brief_time_text, count_text, known, size_text, time_text
from distbench.spec.printable_text import listed

Record = dict[str, Any]
MAX_ROWS, MAX_ALIVE, MAX_LISTED = 40, 8, 6


def _share(row: Record, name: str) -> str:
    part, whole = row.get(name), row.get("predicted_s")
    return f"{100 * part / whole:.1f} %" if known(part) and known(whole) and whole else NOTHING


def _rate_text(row: Record) -> str:
    """Tokens, or samples where the scenario names none, a second and device."""
    unit = "tokens" if known(row.get("num_tokens")) else "samples"
    amount, seconds = row.get("num_tokens") or row.get("batch_size"), row.get("predicted_s")
    if not (known(amount) and known(seconds) and seconds and row.get("world_size")):
        return NOTHING
    return f"{count_text(amount / seconds / row['world_size'])} {unit}/s"


def _is_tight(row: Record) -> bool:
    """Whether it fits only because the allocator gives back what it cached."""
    return row.get("fits") is True and bool(row.get("num_retries"))


COLUMNS: TableColumns = (
    ("<variant", lambda row: str(row.get("variant") or row.get("scenario") or "step")),
    ("step", lambda row: time_text(row.get("predicted_s", float("nan")))),
    ("compute", lambda row: _share(row, "compute_s")),
    ("exposed", lambda row: _share(row, "exposed_s")),
    ("bubble", lambda row: _share(row, "bubble_s")),
    ("idle", lambda row: _share(row, "idle_s")),
    ("a device", _rate_text),
    ("MFU", lambda row: f"{100 * row['mfu']:.1f} %" if known(row.get("mfu")) else NOTHING),
    ("reserved", lambda row: size_text(row.get("peak_reserved_bytes", float("nan")))),
    ("alive", lambda row: size_text(row.get("peak_bytes", float("nan")))),
    ("<fits", lambda row: "tight" if _is_tight(row) else {True: "yes", False: "NO"}.get(row.get("fits"), NOTHING)),
)
OPTIONAL = ("alive", "idle", "a device", "MFU")


def tables(reported: ReportedRun, full: bool = True) -> list[Table]:
    """The tables of a simulated run; nothing for a measured one."""
    run = reported.run
    rows = _rows(run)
    if not rows:
        return []
    notes = [f"{SIMULATED}, not measured: {_where(run)}; a share is of the step", *_assumed(run)]
    if any(map(_is_tight, rows)):
        notes.insert(1, "tight: it fits because the allocator gives back what it cached, whose time is not counted")
    times = table_of(f"{SIMULATED} step time and memory", COLUMNS, rows, notes, (), OPTIONAL, ("bubble",))
    return [capped(times, MAX_ROWS), *_alive(rows)]


def headline(reported: ReportedRun) -> Iterator[str]:
    """What was predicted."""
    run = reported.run
    rows = sorted((row for row in _rows(run) if known(row.get("predicted_s"))), key=lambda row: row["predicted_s"])
    if not rows:
        return
    steps = [
        f"{row.get('variant') or 'a step'} {brief_time_text(row['predicted_s'])}, "
        f"{size_text(row.get('peak_reserved_bytes', float('nan')))} reserved"
        + ("" if row.get("fits", True) else " (does not fit)")
        for row in rows
    ]
    on = f"{run.about.environment.device_name} ({guesses_text(run.about.simulated)})"
    yield f"{SIMULATED} on {on}, not measured: {listed(steps, MAX_LISTED, '; ', '; and {} more')}"


def _rows(run: Run) -> list[Record]:
    world_size = run.about.environment.world_size
    return [
        {**(case["case"].get("params") or {}), **(case.get("counters") or {}), "world_size": world_size}
        for case in run.cases
        if case.get(SIMULATED) and case["status"] == "ok"
    ]


def _where(run: Run) -> str:
    ranks = run.about.simulated.get("ranks")
    listed = ", ".join(map(str, ranks)) if isinstance(ranks, list) and ranks else "0"
    of = f" of {run.about.environment.world_size}" if run.about.environment.world_size else ""
    several = ", times are the slowest one's and memory the fullest one's" if "," in listed else ""
    return f"on {run.about.environment.device_name or 'unknown hardware'}, rank {listed}{of}{several}"


def _assumed(run: Run) -> list[str]:
    sentences = []
    for basis, verb in (("guess", "guessed"), ("fitted", "fitted")):
        names = run.about.simulated.get(basis)
        if isinstance(names, list) and names:
            sentences.append(f"{verb} figures of the hardware file: {', '.join(map(str, names))}")
    if isinstance(extrapolated := run.about.simulated.get("extrapolated"), dict) and extrapolated:
        listed = ", ".join(f"{name} ({instead})" for name, instead in sorted(extrapolated.items()))
        sentences.append(f"not in the hardware file, and extrapolated: {listed}")
    not_simulated = run.about.simulated.get("not_simulated")
    return [*sentences, *map(str, not_simulated if isinstance(not_simulated, list) else ())]


def _alive(rows: Sequence[Record]) -> list[Table]:
    """What the fullest variant holds at its peak."""
    row = max(rows, key=lambda one: one.get("peak_bytes") or 0)
    alive = sorted(row.get("alive") or (), key=lambda one: -one[2])
    if not alive:
        return []
    listed = [(kind, owner or "-", size_text(num_bytes)) for kind, owner, num_bytes in alive[:MAX_ALIVE]]
    notes = [f"{len(alive) - MAX_ALIVE} more in the run file"] if len(alive) > MAX_ALIVE else []
    of = row.get("variant") or row.get("scenario") or "the step"
    return [Table(f"{SIMULATED}: alive at the peak of {of}", ("<what", "<owner", "bytes"), listed, notes)]


SECTION = Section(headline, tables)
