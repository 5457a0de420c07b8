"""The first screen, a few lines a scenario, verdicts first: what ran, what was found, how sure that is, what next."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distbench.judge.links_text import link_lines
from distbench.records.dataframe import Row, measured_of, records_of
from distbench.records.launches import FORWARD_ONLY
from distbench.records.run_file import AGAIN, Run
from distbench.records.run_file_fields import STATUSES
from distbench.report import redistributions
from distbench.report.calibrations import calibration_lines
from distbench.report.collectives import collectives_of
from distbench.report.inference import latency_lines
from distbench.report.operators import operator_lines
from distbench.report.overview import NOT_OK, Contents, busy_line, cautions_of, machine_line
from distbench.report.redistributions import Comparison, Ratios
from distbench.report.simulated_steps import simulated_lines
from distbench.report.steps import steps_of
from distbench.report.study import verdict_lines
from distbench.report.trace_rows import PATH, Trace, costs, step_of, traces_of
from distbench.show.blocks import Block, Code, Heading, Lines, shorten
from distbench.show.terminal import cells, width_here, without_shared
from distbench.show.units import (
    bandwidth_text,
    brief_time_text,
    counts_text,
    known,
    percent_text,
    ratio_text,
    size_text,
    whole_text,
)
from distbench.spec.file_io import short_path
from distbench.spec.mesh import format_mesh
from distbench.spec.placements import BASELINE
from distbench.spec.safe_text import count_text, listed
from distbench.statistics.pass_comparison import BASELINE as HELD_AGAINST
from distbench.statistics.pass_comparison import MIN_PASSES, TOO_FEW
from distbench.statistics.verdicts import FASTER, SLOWER, WITHIN_NOISE

if TYPE_CHECKING:
    import pandas as pd


# What a run found, in a line or two for each kind of case. The verdicts are those of the report's tables.

MAX_NAMED = 4
NO_VERDICT = f"{TOO_FEW} for a verdict"


def step_lines(frame: "pd.DataFrame") -> list[str]:
    """The best and the worst variant beyond noise, how many are within it, and how sure that is."""
    measured = steps_of(frame)
    rows = records_of(measured)
    if not rows:
        return []
    names, _ = without_shared([str(row["variant"]) for row in rows])
    called = dict(zip((row["variant"] for row in rows), names, strict=True))
    first = rows[0]
    is_forward = first["mode"] == FORWARD_ONLY
    what = "forward pass" if is_forward else "step"
    took = f"{brief_time_text(first['median_s'])} a {what}"
    others = [row for row in rows if row["verdict"] != HELD_AGAINST]
    if not others and is_forward:
        return []  # a line of latencies says it all
    if not others:
        times = [f"{name} {brief_time_text(row['median_s'])}" for name, row in zip(names, rows, strict=True)]
        return [took] if len(rows) == 1 else [f"a {what} takes {listed(times, MAX_NAMED)}"]
    again = [row for row in others if str(row["variant"]).endswith(AGAIN)]
    variants = [row for row in others if row not in again]
    faster, slower, same, too_few = (
        [row for row in variants if row["verdict"] == verdict] for verdict in (FASTER, SLOWER, WITHIN_NOISE, TOO_FEW)
    )
    parts = []
    if faster:
        parts.append(f"best: {_speed_text(max(faster, key=lambda row: row['speedup']), called)}")
    if slower:
        parts.append(f"worst: {_speed_text(min(slower, key=lambda row: row['speedup']), called)}")
    if same:
        baselines = list(dict.fromkeys(called[row["held_against"]] for row in same))
        of = baselines[0] if len(baselines) == 1 else f"their {len(baselines)} baselines"
        parts.append(f"{len(same)} {WITHIN_NOISE} of {of}" + f" ({took})" * (not parts))
    if too_few:
        parts.append(f"{took} as {called[first['variant']]}; {NO_VERDICT} on {len(too_few)} more")
    differing = [row for row in again if row["verdict"] in (FASTER, SLOWER)]
    doubts = [f"caution: the baseline, measured again, came out {row['verdict']}" for row in differing]
    return ["; ".join(parts), *_how_sure(measured.attrs["detectable"], measured.attrs["num_passes"]), *doubts]


def _speed_text(row: Row, called: dict[object, str]) -> str:
    speed = ratio_text(row["speedup"], row["speedup_low"], row["speedup_high"])
    return f"{called[row['variant']]} at {speed} times the speed of {called[row['held_against']]}"


def _how_sure(detectable: float, num_passes: int) -> list[str]:
    if not math.isfinite(detectable):
        return []
    return [
        f"{count_text(num_passes, 'pass', 'passes')}: what takes {percent_text(detectable)} "
        "longer would have been found"
    ]


def collective_lines(frame: "pd.DataFrame") -> Iterator[str]:
    """For each mesh dim of several ranks each collective's bus bandwidth at the largest size."""
    found = collectives_of(frame)
    for mesh_dim, of_dim in found[found["group_size"] != 1].groupby("mesh_dim", sort=False):
        largest = of_dim[of_dim["payload_bytes"] == of_dim["payload_bytes"].max()].drop_duplicates("op")
        rows = [row for row in records_of(largest) if known(row["busbw_gb_per_s"])]
        if rows:
            rates = ", ".join(f"{_op_text(row)} {bandwidth_text(row['busbw_gb_per_s']).strip()}" for row in rows)
            where = f"{mesh_dim} ({whole_text(rows[0]['group_size'])} ranks), {size_text(rows[0]['payload_bytes'])}"
            yield f"{where}, busbw GB/s: {rates}"


def _op_text(row: Row) -> str:
    ran = row["backend_op"]
    return f"{row['op']} (run as {ran})" if isinstance(ran, str) and ran != row["op"] else str(row["op"])


def redistribution_lines(frame: "pd.DataFrame") -> Iterator[str]:
    """Each planner against greedy, over all shapes."""
    found = redistributions.comparisons(frame)
    for planner in dict.fromkeys(comparison.planner for comparison in found):
        yield from _planner_lines(planner, [one for one in found if one.planner == planner])


def _planner_lines(planner: str, found: list[Comparison]) -> Iterator[str]:
    sides = [(one, pair) for one in found for pair in one.rows.tolist() if not one.ratios.same[pair]]
    num_pairs = sum(len(one.rows) for one in found)
    if not sides:
        yield f"{planner} takes {BASELINE}'s path on all {count_text(num_pairs, 'pair')}"
        return
    enough = [(one, pair) for one, pair in sides if one.ratios.enough[pair]]
    of_pairs = f"{len(sides)} of {count_text(num_pairs, 'pair')}"
    if not enough:
        yield f"{planner} takes another path than {BASELINE} on {of_pairs}; {NO_VERDICT}"
        return
    faster, slower = ([(one, pair) for one, pair in enough if one.ratios.side[pair] == side] for side in (-1, 1))
    counted = f"faster beyond noise on {len(faster)}, slower on {len(slower)}, neither on the rest"
    yield f"{planner} takes another path than {BASELINE} on {of_pairs}: {counted}"
    named = []
    if faster:
        named.append(f"best: {_pair_text(planner, *min(faster, key=lambda at: _center(*at)))}")
    if slower:
        named.append(f"worst: {_pair_text(planner, *max(slower, key=lambda at: _center(*at)))}")
    if named:
        yield "; ".join(named)
    yield from max(found, key=lambda one: len(one.rows)).ratios.told[:1]


def _center(comparison: Comparison, pair: int) -> float:
    return float(comparison.ratios.ratio.center[pair])


def _pair_text(planner: str, comparison: Comparison, pair: int) -> str:
    ratios: Ratios = comparison.ratios
    facts = comparison.table.pairs.iloc[pair]
    taken = ratio_text(*(float(part[pair]) for part in ratios.ratio))
    what = f"{facts['source']}->{facts['target']} of {size_text(comparison.payload_bytes)}"
    return f"{what} in {taken} of {BASELINE}'s time"


def call_lines(frame: "pd.DataFrame") -> list[str]:
    """Each call's median."""
    rows = records_of(measured_of(frame, "call"))
    names, _ = without_shared([str(row["id"]).removeprefix("call/") for row in rows])
    calls = [f"{name} {brief_time_text(row['median_s'])}" for name, row in zip(names, rows, strict=True)]
    return [f"a call takes {listed(calls, MAX_NAMED)}"] if calls else []


def trace_lines(run: Run) -> list[str]:
    """The path with the most exposed communication of all traced steps; the longest one where that is not known."""
    found = [(row, trace) for trace in traces_of([run])[0] for row in _paths_of(trace)]
    if not found:
        return []
    exposed = [one for one in found if known(one[0]["exposed_s"])]
    name = "exposed_s" if exposed else "time_s"
    row, trace = max(exposed or found, key=lambda one: one[0][name])
    path = f"{row['phase']} {row['source']} {row['kind']} over {row['mesh_dim']}"
    of_step = f"{brief_time_text(row[name])} of a step's {brief_time_text(step_of(trace))}"
    what = "largest exposed path" if exposed else "longest path (what is exposed is not known)"
    return [f"{what}: {path}, {of_step} in {trace.name}"]


def _paths_of(trace: Trace) -> list[Row]:
    if trace.rows.empty:
        return []
    found = costs(trace, PATH)
    rows = records_of(found.assign(exposed_s=found["exposed_share"] * found["time_s"]))
    return [row for row in rows if known(row["time_s"])]


MAX_REASON, MAX_RUNS = 200, 20
# What a reader must not miss comes first: what failed, what differs beyond noise, everything else.
FAILED, DIFFERS, OTHER = range(3)


def summary(contents: Contents, report: str = "") -> list[Block]:
    """The first screen; `report` is the command that shows these runs, for those that come next; empty: none do."""
    runs = contents.runs
    counted = Counter(case["status"] for run in runs for case in run.cases)
    names = Counter(run.scenario for run in runs)
    count = count_text(len(names), "scenario")
    if len(names) < len(runs):
        count = f"{count_text(len(runs), 'run')} of {count}"
    statuses = counts_text({status: counted[status] for status in STATUSES}) or "no case finished"
    cautions = (*dict.fromkeys(line for run in runs for line in cautions_of(run)), *busy_line(runs))
    found = [
        (*_of_run(run, frame, contents, names[run.scenario] > 1), run)
        for run, frame in zip(runs, contents.frames, strict=True)
    ]
    if len(names) < len(runs):
        found.reverse()  # the latest run of a scenario first
    found.sort(key=lambda one: one[0])
    sections = [lines for _, lines, _ in found]
    most = MAX_RUNS if report else len(found)  # a page has them all
    shown = [*sections[:most], *([[f"... {len(found) - most} more"]] if len(found) > most else [])]
    return [
        Heading(f"distbench: {count}: {statuses}", 1),
        Lines((*dict.fromkeys(map(machine_line, runs)), *cautions)),
        Lines(tuple(line for lines in shown for line in lines)),
        *_joined(Lines((*_too_few(sections),)), _next(runs, found[0][2].scenario, report) if report and found else []),
    ]


def _of_run(run: Run, frame: "pd.DataFrame", contents: Contents, with_file: bool) -> tuple[int, list[str]]:
    """Where it stands in the order, and its lines; `with_file` names its file, where others are of its scenario."""
    failed = _failed(run, contents.is_studied(run))
    lines = [*step_lines(frame), *latency_lines(frame), *collective_lines(frame)]
    lines += call_lines(frame)
    lines += operator_lines(frame)
    lines += _of_study(run, contents) if contents.is_studied(run) else redistribution_lines(frame)
    lines += [*simulated_lines(run), *calibration_lines(run), *trace_lines(run), *link_lines(run)]
    differs = any(line.startswith(("best:", "worst:", "SLOW:")) for line in lines)
    rank = FAILED if failed else DIFFERS if differs else OTHER
    return rank, [_head(run, with_file), *(f"  {line}" for line in (*failed, *lines))]


def _too_few(sections: Sequence[Sequence[str]]) -> list[str]:
    """What to do where passes were too few for verdicts."""
    count = sum(any(NO_VERDICT in line for line in lines) for lines in sections)
    told = f"in {count_text(count, 'scenario')} passes were too few to tell variants apart"
    return [f"{told}: measure without --quick, or with --passes {MIN_PASSES}"] if count else []


def _head(run: Run, with_file: bool) -> str:
    about, environment = run.about, run.about.environment
    device = "/".join(part for part in (environment.device or about.device, environment.backend) if part)
    ranks = count_text(environment.world_size, "rank") if environment.world_size else ""
    mesh = "" if about.mesh is None else format_mesh(about.mesh)
    label, file = f"label {about.label}" if about.label else "", run.path.name if with_file else ""
    where = ", ".join(filter(None, (mesh, device, ranks, label, file)))
    counted = Counter(case["status"] for case in run.cases)
    statuses = counts_text({status: counted[status] for status in STATUSES}) or "no case finished"
    return f"{run.scenario} ({where}): {statuses}"


def _failed(run: Run, is_studied: bool) -> list[str]:
    """Why the run did not end as it should, and the first case that is not ok; what a study covers is told there."""
    footer, lines = run.footer, []
    status = str((footer or {}).get("status") or "interrupted")
    if status != "complete":
        message = str((footer or {}).get("message") or "its cases up to then count")
        lines.append(f"NOT COMPLETE: {status}: {shorten(message, MAX_REASON)}")
    bad = [
        case
        for case in run.cases
        if case["status"] in NOT_OK and not (is_studied and case["case"].get("kind") == "redistribute")
    ]
    bad.sort(key=lambda case: STATUSES.index(case["status"]))
    if bad:
        more = f"; {len(bad) - 1} more" if len(bad) > 1 else ""
        reason = shorten(str(bad[0].get("error") or "no reason is recorded"), MAX_REASON)
        lines.append(f"NOT OK: {bad[0]['case']['id']} is {bad[0]['status']}: {reason}{more}")
    return lines


def _of_study(run: Run, contents: Contents) -> list[str]:
    """The planners' verdict, once a study: with its latest run."""
    study = next(study for study in contents.studies if any(run is other for other in study.runs))
    lines = verdict_lines(study)
    return [*lines[:1], *lines[1:][-1:]] if run is study.runs[-1] else []


def _joined(first: Lines, rest: list[Block]) -> list[Block]:
    """No blank line between both, where the rest begins with sentences too."""
    match rest:
        case [Lines(texts), *more]:
            return [Lines((*first.texts, *texts)), *more]
    return [first, *rest]


def _next(runs: Sequence[Run], scenario: str, report: str) -> list[Block]:
    """The commands to go on with, an interrupted run first; those that are too long for a line alone, to be pasted."""
    cut_short = [run for run in runs if run.footer is None or run.footer.get("status") == "interrupted"]
    resume = [f"distbench run --resume {shlex.quote(str(short_path(run.path)))}" for run in cut_short[:1]]
    commands = {
        f"{report} {scenario}": "its own tables",
        f"{report} --full": "everything",
        **({f"{report} --paths": "what each path costs"} if any(run.traces for run in runs) else {}),
        f"{report} --page FILE": "to send on",
    }
    width = max(map(cells, commands))
    lines = [f"  {command}  the cases that it lacks" for command in resume]
    lines += [f"  {command}{' ' * (width - cells(command))}  {what}" for command, what in commands.items()]
    if max(map(cells, lines)) <= width_here():
        return [Lines(("next:", *lines))]
    return [Lines(("next:",)), Code((*resume, *commands))]
