"""The top of a report: what ran where, what is not ok; and how each run's time was spent."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from distbench.render.blocks import Block, Heading, Lines, Table, capped, shorten
from distbench.render.units import known, percent_text, size_text, time_text
from distbench.runs.header import scenario_name
from distbench.runs.run_file import STATUSES, Record, Run

MAX_CASES = 40
# Cases that cannot work here and say so beforehand: `distbench run` exits with 0 for them.
SKIPPED = ("skipped",)
NOT_OK = tuple(status for status in STATUSES if status not in ("ok", *SKIPPED))
MAX_ERROR = 400
# Above this many runnable processes a CPU before the run began, somebody else was measured too.
BUSY_PER_CPU = 0.5


def overview(runs: Sequence[Run], opening: Sequence[Block] = (), told: Sequence[Run] = ()) -> list[Block]:
    """Title, machines, one row a run, the cases that are not ok, and those that were skipped.

    Args:
        runs: the runs.
        opening: what is said first, right under the title.
        told: runs whose redistributions are told of elsewhere, those that are not ok too.
    """
    word = "run" if len(runs) == 1 else "runs"
    machines = tuple(dict.fromkeys(_machine_line(run) for run in runs))
    cautions = (*dict.fromkeys(line for run in runs for line in _cautions(run)), *_busy_line(runs))
    title = Heading(f"distbench report: {len(runs)} {word}", 1)
    blocks: list[Block] = [title, *opening, Lines(machines), _runs_table(runs)]
    if cautions:
        blocks.append(Lines(cautions))
    tables = (cases_table("NOT OK", NOT_OK, runs, told), cases_table("skipped", SKIPPED, runs, told))
    return [*blocks, *(table for table in tables if table)]


def run_status(run: Run) -> str:
    """ "complete", "failed", "timeout" or "interrupted", as the footer has it; no footer is an interrupted run."""
    return str((run.footer or {}).get("status") or "interrupted")


def num_by_status(run: Run) -> dict[str, int]:
    """Cases by status, counted from the cases themselves, in the order of STATUSES."""
    found = Counter(case["status"] for case in run.cases)
    return {status: found[status] for status in STATUSES if found[status]}


def cases_table(name: str, statuses: Sequence[str], runs: Sequence[Run], told: Sequence[Run] = ()) -> Table | None:
    """The cases of some statuses with their errors, the worst first; None where there are none.

    Args:
        name: what the title calls them.
        statuses: names out of STATUSES.
        runs: the runs.
        told: runs whose redistributions are told of elsewhere.
    """
    elsewhere = {id(run) for run in told}
    found = [
        case
        for run in runs
        for case in run.cases
        if case["status"] in statuses and not (id(run) in elsewhere and case["case"].get("kind") == "redistribute")
    ]
    if not found:
        return None
    found.sort(key=lambda case: STATUSES.index(case["status"]))
    rows = [
        (str(case["status"]), str(case["case"]["id"]), shorten(str(case.get("error") or "-"), MAX_ERROR))
        for case in found[:MAX_CASES]
    ]
    title = f"{name}: {len(found)} of {sum(len(run.cases) for run in runs)} cases"
    return capped(Table(title, ("<status", "<case", "<error"), rows), len(found), MAX_CASES)


def spent_line(run: Run) -> str | None:
    """How the run's wall time was spent, largest part first; None where the footer does not say."""
    spent = (run.footer or {}).get("spent_s")
    parts = {name: value for name, value in spent.items() if known(value)} if isinstance(spent, dict) else {}
    total = sum(parts.values())
    if not total > 0:
        return None
    shares = sorted(parts.items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {percent_text(value / total)}" for name, value in shares if value / total >= 0.005)
    return f"time spent: {time_text(total).replace('  ', ' ')} = {text}"


def _runs_table(runs: Sequence[Run]) -> Table:
    columns = ("<scenario", "<mesh", "<device", "ranks", "<status", "wall", "<cases")
    return Table("runs", columns, [_run_row(run) for run in runs])


def _run_row(run: Run) -> tuple[str, ...]:
    job, facts = _job(run), _environment(run)
    mesh = job.get("mesh")
    device = "/".join(str(part) for part in (facts.get("device") or job.get("device"), facts.get("backend")) if part)
    message = (run.footer or {}).get("message")
    counts = ", ".join(f"{count} {status}" for status, count in num_by_status(run).items())
    return (
        scenario_name(run),
        ",".join(f"{name}={size}" for name, size in mesh.items()) if isinstance(mesh, dict) else "-",
        device or "-",
        str(facts.get("world_size") or "-"),
        run_status(run) + (f": {shorten(str(message), MAX_ERROR)}" if message else ""),
        time_text((run.footer or {}).get("wall_s") or float("nan")).replace("  ", " "),
        counts or "none finished",
    )


def _machine_line(run: Run) -> str:
    facts = _environment(run)
    gpus = f"{facts['num_devices']} x {facts['device_name']}" if facts.get("device_name") else ""
    memory = facts.get("memory_bytes")
    hosts = facts.get("num_hosts")
    commit = str(facts.get("git_commit") or "unknown")[:8] + (" (dirty)" if facts.get("git_dirty") else "")
    parts = (
        f"{facts['num_cpus']} CPUs ({facts.get('cpu_model') or 'model unknown'})" if facts.get("num_cpus") else "",
        gpus,
        size_text(memory) if memory else "",
        f"{hosts} hosts" if hosts and hosts != 1 else "",
        f"torch {facts.get('torch') or 'unknown'}",
        f"NCCL {facts['nccl']}" if facts.get("nccl") else "",
        f"commit {commit}",
    )
    return f"{facts.get('machine') or 'unknown machine'}: " + ", ".join(part for part in parts if part)


def _cautions(run: Run) -> list[str]:
    facts, name = _environment(run), scenario_name(run)
    num_cpus, ranks = facts.get("num_cpus"), facts.get("world_size")
    settings = _job(run).get("settings")
    repeats = settings.get("iterations_per_sample", 1) if isinstance(settings, dict) else 1
    lines = []
    if facts.get("device") == "cpu" and known(num_cpus) and known(ranks):
        on_each = ranks / (facts.get("num_hosts") or 1)
        if on_each > num_cpus:
            calm = " (less of it: the ranks ran under SCHED_BATCH)" if facts.get("scheduler") == "batch" else ""
            lines.append(
                f"caution: {on_each:g} ranks share {num_cpus} CPUs, so every time includes waiting for a CPU{calm}"
            )
    if known(repeats) and repeats > 1:
        lines.append(f"{name} is pipelined: a sample is the mean of {repeats} iterations back to back")
    return lines


def _busy_line(runs: Sequence[Run]) -> list[str]:
    """One sentence on the runs that began while the machine was at other work; nothing when none did."""
    busy: dict[str, float] = {}
    for run in runs:
        facts = _environment(run)
        load, num_cpus = facts.get("load_at_start"), facts.get("num_cpus")
        if isinstance(load, list) and load and known(load[0]) and known(num_cpus) and num_cpus > 0:
            share = load[0] / num_cpus
            if share > BUSY_PER_CPU:
                busy[scenario_name(run)] = max(share, busy.get(scenario_name(run), 0.0))
    if not busy:
        return []
    worst = max(busy.values())
    return [f"caution: begun on a busy machine (load up to {worst:.1f} a CPU): {', '.join(busy)}"]


def _job(run: Run) -> Record:
    return _dict(run.header.get("job"))


def _environment(run: Run) -> Record:
    return _dict(run.header.get("environment"))


def _dict(value: Any) -> Record:
    return value if isinstance(value, dict) else {}
