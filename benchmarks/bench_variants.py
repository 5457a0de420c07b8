"""Verdicts between step variants: how often identical ones get one, how often slower ones are found, and whether the
interval beside a median holds it.

Every rate rests on LAUNCHES launches of `benchmarks/variants_scenario.py`. They are kept in `build/variants`, by the
version of the code, so that a benchmark broken off goes on where it was; all parts together take about an hour of a
machine that does nothing else.
"""

import contextlib
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.claims import Claim, Row
from benchmarks.gate_record import restless
from distbench.pytest_plugin.fixture import MeasuredCase
from distbench.records.dataframe import PASSES, frame_of
from distbench.records.results_folder import collect
from distbench.report.steps import steps_of
from distbench.statistics.pass_comparison import as_table, compare_pairs, compare_passes

LAUNCHES = 20
NEIGHBOURS, BUSY_S = 1, 2.0
SCENARIO = Path(__file__).with_name("variants_scenario.py")
FOLDER = Path("build/variants")
SLOWER = {"copy=6": 0.10, "copy=7": 0.20}  # by how much these are slower where they have extra work
REDRAWN = 100
TRIAL = 200  # repeats of the extra work in the launch that tells what one costs
IS_LONG = True
CLAIMS = (
    Claim(
        f'tables of 8 identical step variants with a verdict other than "within noise", of {LAUNCHES} launches: '
        "default; next to a busy neighbour; `--quick`",
        "{:.0%}; {:.0%}; {:.0%}",
        "at most 5 %",
        ("identical, *, launches",),
    ),
    Claim(
        "the same with names permuted in each pass, 100 times per launch",
        "{:.1%}; {:.1%}; {:.1%}",
        "at most 5 %",
        ("identical, *, names redrawn",),
    ),
    Claim(
        f"launches with a verdict of `case.versus` over all pairs of 6 identical collectives ({LAUNCHES} quick "
        "launches, next to a neighbour busy and idle for 2 s each); with names permuted in each pass",
        "{:.0%}; {:.1%}",
        "at most 5 %",
        ("versus, launches", "versus, names redrawn"),
    ),
    Claim(
        "variants about 20 %, 10 % slower that a default launch detects",
        "{:.0%}; {:.0%}",
        "at least 95 %; 60 %",
        ("slower by 20 %*", "slower by 10 %*"),
    ),
    Claim(
        "intervals of a median that contain all identical copies' median",
        "{:.0%}",
        "at least 90 %",
        ("intervals*",),
    ),
    Claim(
        "largest difference of a variant's memory measured first, last and alone",
        "{:.0f} bytes",
        "0",
        ("memory*",),
    ),
)


def launch(folder: Path, *options: str, name: str = "copies") -> None:
    """One run of a scenario; its run file goes under the folder."""
    target = f"{SCENARIO}::{name}"
    command = [sys.executable, "-m", "distbench", "run", target, "--results", str(folder), "--quiet", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def tables_in(folder: Path) -> list[pd.DataFrame]:
    """The steps of each finished launch under a folder, with their verdicts."""
    runs = collect((folder,), folder)[0] if any(folder.rglob("*.jsonl")) else []
    return [steps_of(frame_of([run])) for run in runs if run.footer]


def recorded(folder: Path, *options: str) -> list[pd.DataFrame]:
    """The steps of LAUNCHES launches; those that the folder lacks are made now."""
    while (count := len(tables_in(folder))) < LAUNCHES:
        print(f"  {folder.name}: launch {count + 1} of {LAUNCHES}", flush=True)
        launch(folder, *options)
    return tables_in(folder)


def sweeps_in(folder: Path) -> list[list[MeasuredCase]]:
    """The cases of each finished launch of calls under a folder."""
    runs = collect((folder,), folder)[0] if any(folder.rglob("*.jsonl")) else []
    return [MeasuredCase.all_of(run.cases, run.path) for run in runs if run.footer]


def recorded_calls(folder: Path) -> list[list[MeasuredCase]]:
    """The cases of LAUNCHES quick launches of calls; those that the folder lacks are made now."""
    while (count := len(sweeps_in(folder))) < LAUNCHES:
        print(f"  {folder.name}: launch {count + 1} of {LAUNCHES}", flush=True)
        launch(folder, "--quick", name="calls")
    return sweeps_in(folder)


def has_verdict(ratios: Iterable[str]) -> bool:
    """Whether any is "faster" or "slower"."""
    return bool({"faster", "slower"} & set(ratios))


def redrawn_calls(sweeps: list[list[MeasuredCase]]) -> float:
    """The share of launches with any verdict, REDRAWN times each with the names drawn anew in each pass."""
    draw = np.random.default_rng(0)
    tables = [as_table([np.array(case.pass_medians_s) for case in cases]) for cases in sweeps]
    found = [has_verdict(compare_pairs(draw.permuted(table, axis=0))[1].verdict) for table in tables * REDRAWN]
    return float(np.mean(found))


def busy_and_idle() -> None:
    """Compute for BUSY_S, rest as long, and so on until stopped."""
    matrix = np.ones((200, 200))
    while True:
        until = time.monotonic() + BUSY_S
        while time.monotonic() < until:
            matrix @ matrix
        time.sleep(BUSY_S)


@contextlib.contextmanager
def neighbours(count: int, target: Callable[..., None] = restless) -> Iterator[None]:
    """Processes that compute and rest in turn meanwhile."""
    seeds = [(seed,) if target is restless else () for seed in range(count)]
    processes = [multiprocessing.Process(target=target, args=args, daemon=True) for args in seeds]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def false_tables(tables: list[pd.DataFrame]) -> float:
    """The share of tables of identical variants in which any has a verdict but "within noise"."""
    return float(np.mean([not set(table["verdict"]) <= {"baseline", "within noise"} for table in tables]))


def extra_work(folder: Path) -> tuple[int, int]:
    """Repeats of the extra work that make a step 10 % and 20 % slower here, from one launch with many of them."""
    if not tables_in(folder):
        launch(folder, "--set", f"less={TRIAL}", "--set", f"more={2 * TRIAL}")
    table = tables_in(folder)[0]
    medians = table.set_index("variant")["median_s"]
    plain = medians[[name for name in medians.index if name not in SLOWER]].median()
    each = (medians["copy=7"] - plain) / (2 * TRIAL)
    less, more = (max(1, math.ceil(share * plain / each)) for share in SLOWER.values())
    return less, more


def coverage(tables: list[pd.DataFrame]) -> float:
    """The share of printed median intervals that hold the median of all copies of their launch."""
    held = []
    for table in tables:
        common = np.nanmedian(np.concatenate(table[PASSES].tolist()))
        held += ((table["ci_low_s"] <= common) & (common <= table["ci_high_s"])).tolist()
    return float(np.mean(held))


def detected_share(tables: list[pd.DataFrame], variant: str) -> float:
    """The share of tables that call this variant slower."""
    return float(np.mean([table.set_index("variant")["verdict"][variant] == "slower" for table in tables]))


def slowdown(tables: list[pd.DataFrame], variant: str) -> float:
    """Geometric mean over the launches of the variant's time over that of the copies without extra work."""
    logs = []
    for table in tables:
        names = table["variant"].tolist()
        passes = dict(zip(names, np.log(np.vstack(table[PASSES].tolist())), strict=True))
        plain = np.mean([values for name, values in passes.items() if name not in SLOWER], axis=0)
        logs.append(np.nanmean(passes[variant] - plain))
    return float(np.expm1(np.mean(logs)))


def describe(name: str, tables: list[pd.DataFrame]) -> None:
    """Print what launches a rate holds for."""
    passes = np.median([len(table[PASSES].iloc[0]) for table in tables])
    detectable = np.median([table.attrs["detectable"] for table in tables])
    print(f"  {name}: {len(tables)} launches, median {passes:.0f} passes, told apart from {100 * detectable:.0f} %")


def redrawn(tables: list[pd.DataFrame]) -> float:
    """As `false_tables`, REDRAWN times a table with its names drawn anew in each pass, so that none differs."""
    draw, false = np.random.default_rng(0), 0
    for values in (np.vstack(table[PASSES].tolist()) for table in tables):
        for _ in range(REDRAWN):
            verdicts = compare_passes(draw.permuted(values, axis=0), [0] * len(values)).verdict
            false += bool({"faster", "slower"} & set(verdicts))
    return false / (REDRAWN * len(tables))


def memory_difference(folder: Path) -> float:
    """By how many bytes the peaks of one variant differ that is measured first, last and alone."""
    peaks: list[float] = []
    for name, order in {"first": "3,0,1", "last": "0,1,3", "alone": "3"}.items():
        if not tables_in(folder / name):
            launch(folder / name, "--quick", "--set", f"copy={order}")
        table = tables_in(folder / name)[0]
        peaks += table["peak_bytes"][(table["variant"] == "copy=3") | (len(table) == 1)].tolist()
    return max(peaks) - min(peaks) if len(peaks) == 3 else math.nan


def main() -> list[Row]:
    """Rows (name, measured, allowed): shares of launches, and bytes."""
    tree = subprocess.run(["git", "rev-parse", "HEAD:distbench"], capture_output=True, text=True).stdout.strip()
    folder = FOLDER / (tree[:12] or "unversioned")
    quiet = recorded(folder / "identical")
    quick = recorded(folder / "identical-quick", "--quick")
    less, more = extra_work(folder / "trial")
    slower = recorded(folder / "slower", "--set", f"less={less}", "--set", f"more={more}")
    with neighbours(NEIGHBOURS):
        beside = recorded(folder / "identical-neighbour")
    with neighbours(NEIGHBOURS, busy_and_idle):
        sweeps = recorded_calls(folder / "calls-neighbour")
    for name, tables in (("quiet", quiet), ("quick", quick), ("slower", slower), ("beside a neighbour", beside)):
        describe(name, tables)
    rows = []
    for name, tables in (("default", quiet), ("beside a neighbour", beside), ("--quick", quick)):
        rows.append((f"identical, {name}, launches", false_tables(tables), 0.05))
        rows.append((f"identical, {name}, names redrawn", redrawn(tables), 0.05))
    verdicts = [has_verdict(one.versus(other).verdict for one, other in combinations(cases, 2)) for cases in sweeps]
    rows.append(("versus, launches", float(np.mean(verdicts)), 0.05))
    rows.append(("versus, names redrawn", redrawn_calls(sweeps), 0.05))
    for variant, least in (("copy=7", -0.95), ("copy=6", -0.60)):
        name = f"slower by {100 * SLOWER[variant]:.0f} %, in fact {100 * slowdown(slower, variant):.1f} %"
        rows.append((name, detected_share(slower, variant), least))
    rows.append(("intervals that hold the median of all copies", coverage(quiet), -0.90))
    rows.append(("memory of one variant first, last, alone: bytes", memory_difference(folder / "memory"), 0))
    return rows
