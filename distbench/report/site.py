"""Static pages over all launches of a results folder: an index with the changed cases, and pages of cases with trends.

`judge/history.py` gives the verdicts. The folder has a file MARKER with the digest of each page, so that files
of other programs are never overwritten or deleted.
"""

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from distbench.judge.gate_text import collect_text, number_text
from distbench.judge.history import (
    ALL_CASES,
    OF_LATENCIES,
    PAIRS_ADVISED,
    JudgedCases,
    Point,
    Series,
    judge_cases,
    more_launches,
    next_step,
    origin,
)
from distbench.records.dataframe import frame_of
from distbench.records.launches import SECONDS, Launch
from distbench.records.run_file import MUST_AGREE, read_run
from distbench.records.run_index import IndexedLaunch, RunIndex
from distbench.report.page import page_blocks, write_page
from distbench.report.sections import Contents
from distbench.show.blocks import Heading, Lines, Notes, Table
from distbench.show.html import BAD, GOOD, PageBlock, Tiles, Trends, Verdict, page_of
from distbench.show.units import NOTHING, times_text
from distbench.spec.discovery import argument_of
from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole, writing
from distbench.spec.printable_text import clean, count_text
from distbench.statistics.intervals import median_ci_ranks

MARKER = ".distbench-site"
MAX_PAGE_BYTES = 2_000_000
MAX_CASES, MAX_CHANGED, MAX_PLOTS = 1000, 500, 20
PAGE_BYTES, LAUNCH_BYTES, CASE_BYTES, ID_COPIES = 80_000, 700, 1000, 4  # in a page, at most
MISSING = 0xFFFF
RUNS = "runs"  # folder of pages of runs
MIN_FOR_INTERVAL = 6  # launches, for a 95 % interval of their median
SLOWER, RECOVERED, FASTER = "slower", "recovered", "faster"
STANDINGS = (SLOWER, RECOVERED, FASTER)
CASE_COLUMNS = ("<case", "<standing", "change", "<since", "<commit", "p10", "<95 % interval")
LAUNCH_COLUMNS = ("<date", "<commit", "<label", "<torch", "<run")
CHANGED_COLUMNS = ("<case", "<standing", "change", "<since", "<commit", "<page")
GROUP_COLUMNS = ("<page", "cases", "launches", *STANDINGS, "<newest launch", "<commit", "<torch")
NO_VERDICT = "Ratio of 10th percentiles without a verdict, because each side is one launch"


@dataclass(frozen=True)
class ChangedCase:
    """A case with a change. `page` is the file with its trend, `data` its entry for the page's script."""

    series: Series
    page: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def standing(self) -> str:
        """FASTER if the case only became faster. Otherwise RECOVERED if the newest level is nearer to the level before
        the slowdown, else SLOWER.
        """
        levels = self.series.levels
        slowdowns = [number for number, (_, change) in enumerate(self.series.changes) if change > 0]
        if not slowdowns:
            return FASTER
        before, after = levels[slowdowns[-1]].seconds, levels[slowdowns[-1] + 1].seconds
        return RECOVERED if levels[-1].seconds < math.sqrt(before * after) else SLOWER

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: regressions come first, and each kind is sorted by size."""
        return STANDINGS.index(self.standing), -max(abs(math.log1p(change)) for _, change in self.series.changes)

    @property
    def finding(self) -> str:
        """The latest change in words."""
        point, change = self.series.changes[-1]
        times = times_text(1 + change, "before", words=self.series.unit.words)
        recovered = f" ({RECOVERED})" if self.standing == RECOVERED else ""
        return f"{times} since {' '.join(origin(point))}{recovered}"


@dataclass
class Group:
    """The launches of one scenario that are comparable, as on one machine, and the changes of their cases.

    Args:
        shown: the launches in the order of the values, without launches that measured nothing.
    """

    name: str
    launches: Sequence[IndexedLaunch]
    shown: Sequence[Launch] = ()
    pages: list[str] = field(default_factory=list)
    changed: list[ChangedCase] = field(default_factory=list)
    num_cases: int = 0
    is_tested: bool = True

    @property
    def scenario(self) -> str:
        """The scenario's name."""
        return self.launches[0].launch.scenario

    @property
    def machine(self) -> str:
        """The machine's name."""
        return str(self.launches[0].launch.facts.get("machine") or "unknown machine")

    @property
    def torch(self) -> str:
        """The versions of torch, oldest launch first, separated by commas."""
        return ", ".join(dict.fromkeys(_torch(each.launch) for each in self.launches))

    @property
    def keys(self) -> dict[str, str]:
        """The group's name, and values of the filters of the index."""
        return {
            "page": self.name,
            "scenario": clean(self.scenario),
            "machine": clean(self.machine),
            "torch": clean(self.torch),
        }


@dataclass(frozen=True)
class Site:
    """Return the groups with their changes, newest group first."""

    groups: Sequence[Group]

    @property
    def changed(self) -> list[tuple[Group, ChangedCase]]:
        """The changed cases with their group, regressions first."""
        together = [(group, case) for group in self.groups for case in group.changed]
        return sorted(together, key=lambda pair: pair[1].rank)

    @property
    def headline(self) -> tuple[str, ...]:
        """The finding, with its severity first, and the next command."""
        cases = [case for _, case in self.changed]
        num_cases = sum(group.num_cases for group in self.groups)
        launches = [each.launch for group in self.groups for each in group.launches]
        finding = _finding(cases, num_cases, launches, any(group.is_tested for group in self.groups))
        if cases:
            return finding, next_step(cases[0].series)
        more = launches[-1].more
        if more and not any(group.is_tested for group in self.groups):
            return finding, more_launches(num_cases)
        command = f"distbench ab REF_A REF_B -- {argument_of(launches[-1].scenario)}   (compares revisions)"
        return finding, f"Next: {collect_text(more, PAIRS_ADVISED) if more else command}"


def write_site(
    index: RunIndex,
    folder: Path,
    is_chosen: Callable[[str], bool],
    num_run_pages: int,
) -> Site:
    """Judge all launches and write the pages into `folder`, which is replaced as a whole at the end.

    Args:
        is_chosen: whether a case id is included.
        num_run_pages: number of newest launches per group whose report page is written. Pages of earlier sites remain.

    Raises:
        UserError: the folder has files that distbench did not write or cannot be written, or no case is measured.
    """
    require_own(folder)
    target = Path(os.path.realpath(folder))
    new, old = (target.with_name(f".{target.name}.{word}.{os.getpid()}") for word in ("new", "old"))
    try:
        with writing(f"--output-dir {folder}", "folder"):
            new.mkdir(parents=True)
            site = _write_pages(index, new, target, is_chosen, num_run_pages)
            files = sorted(path for path in new.rglob("*") if path.is_file())
            digests = {str(path.relative_to(new)): _digest(path) for path in files}
            (new / MARKER).write_text(json.dumps({"written by": "distbench site", "sha256": digests}, indent=1) + "\n")
            require_own(folder)
            if target.exists():
                target.rename(old)
            new.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for path in (new, old):
            shutil.rmtree(path, ignore_errors=True)
    return site


def require_own(folder: Path) -> None:
    """Raise UserError if a path exists and is not a folder with only pages that distbench wrote."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UserError(f"--output-dir {folder} is not a folder; give a new folder")
    files = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    digests: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        digests = dict(json.loads((folder / MARKER).read_text())["sha256"])
    for path in files:
        name = str(path.relative_to(folder))
        if name == MARKER and digests:
            continue
        if name not in digests:
            raise UserError(f"{path} was not written by distbench site; move this file, or give another --output-dir")
        if path.is_symlink() or _digest(path) != digests[name]:
            raise UserError(
                f"{path} was changed after distbench site wrote this file; move the file, or give another folder"
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_pages(
    index: RunIndex, folder: Path, earlier: Path, is_chosen: Callable[[str], bool], num_run_pages: int
) -> Site:
    groups = _groups(index.launches)
    runs = _run_pages(groups, folder / RUNS, earlier / RUNS, num_run_pages)
    kept = []
    for group in groups:
        case_ids, p10_s, units = index.p10_s(group.launches, is_chosen)
        if not case_ids:
            continue
        launches = [each.launch for each in group.launches]
        judged = judge_cases(group.scenario, launches, case_ids, p10_s, units)
        del p10_s
        _write_group(group, judged, runs, folder)
        kept.append(group)
    if not kept:
        raise UserError("no launch has a measured case that was selected; measure with `distbench run`, or change -k")
    site = Site(kept)
    addresses = {group.name: group.pages[0] for group in kept}
    _write(folder / "index.html", _index_blocks(site), addresses)
    return site


def _run_pages(groups: Sequence[Group], folder: Path, earlier: Path, num_new: int) -> dict[str, str]:
    """Copy report pages of an earlier site, and write report pages of each group's newest launches. Return the
    addresses by id of the run. A run whose page would be too large has no address.
    """
    addresses = {}
    for group in groups:
        for age, launch in enumerate(each.launch for each in reversed(group.launches)):
            source = Path(launch.source)
            page, before = folder / f"{source.stem}.html", earlier / f"{source.stem}.html"
            status = source.stat()
            if before.exists() and before.stat().st_mtime >= status.st_mtime:
                folder.mkdir(exist_ok=True)
                shutil.copy2(before, page)
            elif age < num_new and source.suffix == ".jsonl" and not launch.more and status.st_size < MAX_PAGE_BYTES:
                folder.mkdir(exist_ok=True)
                runs = [read_run(source)]
                write_page(page, page_blocks(Contents.of(runs, frame_of(runs))))
                if page.stat().st_size > MAX_PAGE_BYTES:
                    page.unlink()
            if page.exists():
                addresses[launch.run_id] = f"{RUNS}/{page.name}"
    return addresses


def _write(path: Path, blocks: Iterator[PageBlock], addresses: Mapping[str, str]) -> None:
    all_blocks = list(blocks)
    heading = next(block.text for block in all_blocks if isinstance(block, Heading))
    write_whole(path, page_of(f"distbench: {heading}", all_blocks, addresses))


def _groups(launches: Sequence[IndexedLaunch]) -> list[Group]:
    """Comparable launches of each scenario, as `history` compares them; the newest group first."""
    together: dict[str, list[IndexedLaunch]] = {}
    for each in launches:
        facts = [each.launch.scenario, *(each.launch.facts.get(name) for name in MUST_AGREE)]
        together.setdefault(json.dumps(facts), []).append(each)
    groups: list[Group] = []
    taken = Counter[str]()
    for of_group in sorted(together.values(), key=lambda each: -each[-1].launch.started_at):
        group = Group("", of_group)
        mesh = of_group[-1].launch.facts.get("mesh")
        name = clean(f"{group.scenario} on {group.machine}{f', {mesh}' if mesh else ''}")
        taken[name] += 1
        groups.append(replace(group, name=name if taken[name] == 1 else f"{name} ({taken[name]})"))
    return groups


def _torch(launch: Launch) -> str:
    return str(launch.facts.get("torch") or "unknown")


def _origin(launch: Launch) -> tuple[str, str]:
    """Date, and commit, of a launch."""
    commit = launch.facts.get("git_commit")
    point = Point(launch.started_at, str(commit) if commit else None, bool(launch.facts.get("git_dirty")), 0.0)
    return origin(point)


def _finding(cases: Sequence[ChangedCase], num_cases: int, launches: Sequence[Launch], is_tested: bool) -> str:
    """The finding in one line, with the severity that `history` prints for these cases."""
    counts, num_launches = Counter(case.standing for case in cases), count_text(len(launches), "launch", "launches")
    num_regressions = counts[SLOWER] + counts[RECOVERED]
    oldest = min((launch.started_at, _origin(launch)[0][:10]) for launch in launches)[1]
    since = f" since {oldest}" if oldest != NOTHING else ""
    of_cases = f"in {count_text(num_cases, 'case')}{since}"
    if num_regressions:
        recovered = f", {counts[RECOVERED]} of them recovered" if counts[RECOVERED] else ""
        faster = f" Improvements: {counts[FASTER]:,}." if counts[FASTER] else ""
        return f"FAIL: {count_text(num_regressions, 'regression')} {of_cases}{recovered}.{faster}"
    if counts[FASTER]:
        return f"PASS: {count_text(counts[FASTER], 'improvement')} and no regression {of_cases}"
    if not is_tested:
        return f"UNKNOWN: too few launches to detect a change: {num_launches} {of_cases}"
    return f"PASS: no change {of_cases} ({num_launches})"


def _write_group(group: Group, judged: JudgedCases, runs: Mapping[str, str], folder: Path) -> None:
    """Write the pages of a group, its changed cases first."""
    group.num_cases, group.is_tested, group.shown = len(judged.case_ids), judged.is_tested, judged.launches
    changed = {row: ChangedCase(judged.series(row)) for row in judged.changed_rows}
    steady = (row for row in range(group.num_cases) if row not in changed)
    rows = [*sorted(changed, key=lambda row: changed[row].rank), *sorted(steady, key=judged.case_ids.__getitem__)]
    parts = _parts(rows, judged)
    stem = re.sub(r"\W+", "-", group.name).strip("-").lower()[:80]
    group.pages = [f"{stem}{f'-{number + 1}' if number else ''}.html" for number in range(len(parts))]
    contents = [(f"page {number + 1}", _contents(part, judged, changed)) for number, part in enumerate(parts)]
    addresses = {"all runs": "index.html"} | {f"page {number + 1}": page for number, page in enumerate(group.pages)}
    addresses |= {_run_name(launch): runs[launch.run_id] for launch in judged.launches if launch.run_id in runs}
    for number, (part, page) in enumerate(zip(parts, group.pages, strict=True)):
        data = {row: _entry(row, judged, changed.get(row)) for row in part}
        group.changed += [replace(changed[row], page=page, data=data[row]) for row in part if row in changed]
        blocks = _group_blocks(group, judged, number, changed, data, contents)
        _write(folder / page, blocks, addresses)


def _parts(rows: Sequence[int], judged: JudgedCases) -> list[list[int]]:
    """Rows of each page, so that no page exceeds MAX_PAGE_BYTES."""
    budget = MAX_PAGE_BYTES - PAGE_BYTES - LAUNCH_BYTES * len(judged.launches)
    parts: list[list[int]] = [[]]
    used = 0.0
    for row in rows:
        size = CASE_BYTES + 8 / 3 * len(judged.launches) + ID_COPIES * len(judged.case_ids[row].encode())
        if parts[-1] and (used + size > budget or len(parts[-1]) == MAX_CASES):
            parts.append([])
            used = 0.0
        parts[-1].append(row)
        used += size
    return parts


def _contents(part: Sequence[int], judged: JudgedCases, changed: Mapping[int, ChangedCase]) -> str:
    steady = [judged.case_ids[row] for row in part if row not in changed]
    texts = [count_text(len(part) - len(steady), "changed case")] if len(steady) < len(part) else []
    return "; ".join([*texts, *([f"{steady[0]} to {steady[-1]}"] if steady else [])])


def _entry(row: int, judged: JudgedCases, case: ChangedCase | None) -> dict[str, Any]:
    """A series for the script: values as 16-bit steps between the least and the largest logarithm."""
    if row == ALL_CASES and case is not None:
        name, unit, cuts = case.series.case_id, case.series.unit, judged.points.shared
        logs = np.log([point.seconds for point in case.series.points])
    else:
        name, logs, cuts = judged.case_ids[row], judged.logs[row], judged.points.own[row]
        unit = judged.units.get(name, SECONDS)
    given = -logs if unit.is_reciprocal else logs
    low, high = float(np.nanmin(given)), float(np.nanmax(given))
    span = max(high - low, 1e-9)
    steps = np.where(np.isnan(given), MISSING, np.round((np.nan_to_num(given, nan=low) - low) / span * (MISSING - 1)))
    return {
        "name": clean(name),
        "unit": unit.name,
        "low": float(f"{math.exp(low):.6g}"),
        "span": round(span, 9),
        "steps": base64.b64encode(steps.astype("<u2").tobytes()).decode(),
        "cuts": cuts,
        "slower": [change > 0 for _, change in case.series.changes] if case else [],
        "group": 0,
    }


def _trends(title: str, series: Sequence[dict[str, Any]], launches: Sequence[Sequence[Launch]], **more: Any) -> Trends:
    """Data of `trends.js`; `launches` has the launches of each group."""
    most = max(map(len, launches))
    ranks = [median_ci_ranks(count)[0] if count else 0 for count in range(most + 1)]
    about = [
        [dict(zip(("date", "commit"), _origin(launch), strict=True), label=clean(launch.label), torch=_torch(launch))
         for launch in of_group]
        for of_group in launches
    ]  # fmt: skip
    data = {"series": series, "launches": about, "ranks": ranks, **more}
    return Trends(title, json.dumps(data, separators=(",", ":")))


def _group_blocks(
    group: Group,
    judged: JudgedCases,
    number: int,
    changed: Mapping[int, ChangedCase],
    data: Mapping[int, dict[str, Any]],
    contents: Sequence[tuple[str, str]],
) -> Iterator[PageBlock]:
    """Yield a page of cases: the finding, the chosen trend, the cases, and the launches."""
    yield Heading(f"{group.name}{f', page {number + 1} of {len(contents)}' if len(contents) > 1 else ''}", 1)
    yield Heading("Trend")
    yield Verdict((_finding([*changed.values()], group.num_cases, judged.launches, judged.is_tested),))
    yield Lines(("all runs",))
    yield _trends("Trend of a case", [*data.values()], [judged.launches], otherwise=NO_VERDICT)
    yield Heading("Cases")
    for title, is_changed in (("Changed cases, regressions first", True), ("Cases without a change", False)):
        rows = [
            _case_cells(row, judged, changed.get(row), is_changed) for row in data if (row in changed) is is_changed
        ]
        if rows:
            yield Table(title, CASE_COLUMNS if is_changed else (CASE_COLUMNS[0], *CASE_COLUMNS[-2:]), rows)
    if len(contents) > 1:
        yield Table("Pages of cases", ("<page", "<cases"), contents)
    yield Heading("Compare two launches")
    yield Lines(("For a verdict, alternate launches of both commits (distbench ab).",))
    if number == 0:
        yield Heading("Launches")
        launches = [
            (*_origin(launch), clean(launch.label), _torch(launch), _run_name(launch))
            for launch in reversed(judged.launches)
        ]
        yield Table("Launches, newest first", LAUNCH_COLUMNS, launches)
        latency = [f"{group.scenario}: {OF_LATENCIES}"] if group.launches[-1].is_latency else []
        yield Notes((*judged.notes(), *latency))


def _run_name(launch: Launch) -> str:
    return clean(Path(launch.source).name)


def _case_cells(row: int, judged: JudgedCases, case: ChangedCase | None, is_changed: bool) -> tuple[str, ...]:
    """The cells of a case: its newest level, and its latest change."""
    if case:
        series = case.series
        name, unit = series.case_id, series.unit
        newest = np.sort([point.seconds for point in series.points[series.levels[-1].start :]])
    else:
        name = judged.case_ids[row]
        unit = judged.units.get(name, SECONDS)
        ordered = np.sort(np.exp(judged.logs[row]))
        newest = ordered[: len(ordered) - int(np.isnan(ordered).sum())]
    low = median_ci_ranks(len(newest))[0]
    ends = [newest[low], newest[-1 - low]]
    interval = " to ".join(" ".join(number_text(float(end), unit).split()) for end in sorted(ends, key=unit.given))
    level = number_text(float((newest[(len(newest) - 1) // 2] + newest[len(newest) // 2]) / 2), unit)
    cells = (clean(name), level, interval if len(newest) >= MIN_FOR_INTERVAL else NOTHING)
    return (cells[0], *_change_cells(case), *cells[1:]) if case else cells


def _change_cells(case: ChangedCase) -> tuple[str, ...]:
    """Standing, latest change, date and commit."""
    point, change = case.series.changes[-1]
    return case.standing, f"{100 * case.series.unit.change(change):+.0f} %", *origin(point)


def _index_blocks(site: Site) -> Iterator[PageBlock]:
    """Yield the index: the headline, the changed cases with plots, and the pages."""
    changed, groups = site.changed, list(site.groups)
    counts = Counter(case.standing for _, case in changed)
    yield Heading("Performance over all runs", 1)
    yield Heading("Summary")
    yield Verdict(site.headline)
    looks = {SLOWER: BAD, RECOVERED: "", FASTER: GOOD}
    tiles = [(f"{counts[name]:,}", name, looks[name] if counts[name] else "") for name in STANDINGS]
    num_launches = sum(len(group.launches) for group in groups)
    totals = (f"{sum(group.num_cases for group in groups):,}", "cases", ""), (f"{num_launches:,}", "launches", "")
    yield Tiles((*tiles, *totals))
    yield Heading("Changes")
    plots = [
        {
            **case.data,
            "group": groups.index(group),
            "page": case.page,
            "finding": case.finding,
            "standing": case.standing,
        }
        for group, case in changed[:MAX_PLOTS]
    ]
    plotted = {id(group) for group, _ in changed[:MAX_PLOTS]}
    launches = [group.shown if id(group) in plotted else () for group in groups]
    yield _trends("Changed cases", plots, launches, keys=[group.keys for group in groups])
    if changed:
        rows = [(clean(case.series.case_id), *_change_cells(case), group.name) for group, case in changed[:MAX_CHANGED]]
        left_out = (
            [f"{len(changed) - MAX_CHANGED:,} more changed cases are on the pages below"]
            if len(changed) > MAX_CHANGED
            else []
        )
        yield Table("Changed cases, regressions first", CHANGED_COLUMNS, rows, left_out)
    yield Heading("Pages")
    yield Table("Cases and launches by scenario and machine", GROUP_COLUMNS, [_group_cells(group) for group in groups])


def _group_cells(group: Group) -> tuple[str, ...]:
    counts = Counter(case.standing for case in group.changed)
    numbers = (group.num_cases, len(group.launches), *(counts[name] for name in STANDINGS))
    newest = group.launches[-1].launch
    return group.name, *(f"{number:,}" for number in numbers), *_origin(newest), clean(group.torch)
