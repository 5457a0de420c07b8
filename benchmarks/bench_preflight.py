"""Injected faults that `distbench preflight` names, and its false alarms: 8 ranks on two hosts, and made-up times.

`./run.sh bench preflight`: ten launches of each kind in the lab of `links_lab.py`, about an hour, then 100 made-up
launches of each kind on 64 and on 512 ranks (`simulated_links.py`), 10 minutes. Each launch is kept in build/preflight/
as it ends, and an interrupted series continues, as long as the code is the same. `python -m benchmarks.bench_preflight
--launches N [--kind KIND]` for fewer launches, `--simulated` for the made-up times only; `--picture FILE` draws the
heat map of one launch with a slow cable. The lab needs root and iproute2.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.claims import Claim, Row, detail
from benchmarks.cpu_limit import NoCpuLimit
from benchmarks.links_lab import NUM_RANKS, RANKS_PER_HOST, ROOT, Faults, Lab, links_lab
from benchmarks.simulated_links import RANKS_PER_HOST as SIMULATED_PER_HOST
from benchmarks.simulated_links import simulated
from benchmarks.two_host_lab import NoNamespaces
from distbench.cases.links import link_rounds
from distbench.judge.links import HOST, LINK, RANK
from distbench.judge.links_text import link_figures, slow_in, verdict_on
from distbench.records.results_folder import run_files_in
from distbench.records.run_file import Run, read_run
from distbench.show import plots

IS_LONG = True
NUM_LAUNCHES, NUM_SIMULATED, SEED = 10, 100, 1
FOLDER = ROOT / "build" / "preflight"
# The CPU limit's period is short enough for these bursts.
WORDS = ("--set", "burst_s=0.1")
# What a series depends on: with other code it begins from zero.
CODE = ("benchmarks/*link*.py", "benchmarks/bench_preflight.py", "benchmarks/cpu_limit.py", "benchmarks/packet_loss.py",
        "scenarios/links.py", "distbench/cases/links.py", "distbench/judge/*link*.py", "distbench/judge/preflight.py",
        "distbench/worker/pass_schedule.py", "distbench/ranks/measure.py")  # fmt: skip
PICTURED = 5  # the rank whose cable is slow in the picture
QUIET, NEIGHBOUR = "quiet", "neighbour"
FAULTS = ("rank", "link", "host", "one-way", "two at once", "flapping", "packet loss")
KINDS = (*FAULTS, QUIET, NEIGHBOUR)
# Outcomes: FAIL that names the fault and nothing else; FAIL that names something else; PASS with a fault; UNKNOWN.
RIGHT, WRONG, MISSED, UNKNOWN = OUTCOMES = ("rightly", "wrongly", "missed", "UNKNOWN")
CLAIMS = (
    Claim(
        "`preflight` on 8 ranks on two hosts, 7 kinds of faults: named rightly; UNKNOWN",
        "{:.0f} %; {:.0f} % of {:.0f} launches",
        "at least 95 %",
        ("lab: named rightly", "lab: UNKNOWN with a fault", "lab: launches with a fault"),
    ),
    Claim(
        "the same without a fault: false alarms when quiet, next to a neighbour; UNKNOWN",
        "{:.0f} %, {:.0f} %; {:.0f} %, {:.0f} %",
        "at most 5 %",
        ("lab: quiet, false alarms", "lab: neighbour, false alarms", "lab: quiet, UNKNOWN", "lab: neighbour, UNKNOWN"),
    ),
    Claim(
        "the same on made-up times of 64 and 512 ranks: named rightly; false alarms without a fault",
        "{:.1f} %, {:.1f} %; {:.1f} %, {:.1f} %",
        "at least 95 %; at most 5 %",
        ("64 ranks: named rightly", "512 ranks: named rightly", "64 ranks: false alarms", "512 ranks: false alarms"),
    ),
    Claim("`links` on 8 ranks", "{:.0f} s", "60 s", ("links: seconds",)),
)


def faults_of(kind: str, number: int, num_ranks: int, ranks_per_host: int) -> Faults:
    """The faults of one launch, of ranks drawn at random. In turn, a slow host computes slowly or has slow cables."""
    draw = random.Random(f"{SEED} {number} {kind}")
    first, second = draw.sample(range(num_ranks), 2)
    host = first // ranks_per_host
    of_host = tuple(range(host * ranks_per_host, (host + 1) * ranks_per_host))
    return {
        "rank": Faults(computes=(first,)),
        "link": Faults(link=tuple(sorted(met_by(first, num_ranks, ranks_per_host, draw)))),
        "host": Faults(cable=of_host) if number % 2 else Faults(computes=of_host),
        "one-way": Faults(one_way=(first,)),
        "two at once": Faults(computes=(first,), cable=(second,)),
        "flapping": Faults(flaps=(first,)),
        "packet loss": Faults(lossy=(first,)),
        QUIET: Faults(),
        NEIGHBOUR: Faults(has_neighbour=True),
    }[kind]


def met_by(rank: int, num_ranks: int, ranks_per_host: int, draw: random.Random) -> tuple[int, int]:
    """One of the links of a rank that are measured; beyond 64 ranks these are not all links."""
    hosts = [str(other // ranks_per_host) for other in range(num_ranks)]
    return draw.choice([pair for one in link_rounds(hosts) for pair in one.pairs if rank in pair])


def outcome_of(faults: Faults, verdict: str, named: Sequence[tuple[str, Sequence[int], str]]) -> str:
    """One of OUTCOMES, from what was named: kind, ranks, and what is slow. Without a fault PASS is right."""
    wanted = {(RANK, (rank,)) for rank in (*faults.one_way, *faults.flaps, *faults.lossy)}
    for ranks in (faults.computes, faults.cable):
        wanted |= {(RANK if len(ranks) == 1 else HOST, tuple(ranks))} if ranks else set()
    wanted |= {(LINK, tuple(faults.link))} if faults.link else set()
    if verdict == "FAIL":
        result = {(kind, tuple(ranks)) for kind, ranks, _ in named}
        return RIGHT if result == wanted and _are_slow_in(faults, named) else WRONG
    if verdict == "UNKNOWN":
        return UNKNOWN
    return MISSED if wanted else RIGHT


def _are_slow_in(faults: Faults, named: Iterable[tuple[str, Sequence[int], str]]) -> bool:
    """Whether each fault is named in the quantity that it makes slow; lost packets may also make messages slow."""
    result = {(rank, quantity) for _, ranks, quantity in named for rank in ranks}
    computes = {(rank, "computing") for rank in faults.computes}
    sends = {(rank, "large messages") for rank in (*faults.cable, *faults.one_way, *faults.flaps, *faults.link)}
    return computes | sends | {(rank, "packets") for rank in faults.lossy} <= result


@dataclass(frozen=True)
class Launch:
    """One launch: its faults, and what was named (kind, ranks, what is slow)."""

    number: int
    kind: str
    verdict: str
    named: list[tuple[str, list[int], str]]
    seconds: float

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        return outcome_of(faults_of(self.kind, self.number, NUM_RANKS, RANKS_PER_HOST), self.verdict, self.named)

    def line(self) -> str:
        """For who watches."""
        faults = faults_of(self.kind, self.number, NUM_RANKS, RANKS_PER_HOST)
        ranks = [f"{name} {ranks}" for name, ranks in asdict(faults).items() if ranks]
        names = "; ".join(f"{kind} {','.join(map(str, ranks))} {slow_in}" for kind, ranks, slow_in in self.named)
        about = f"{self.number + 1:3d} {self.kind} ({'; '.join(ranks)}), {self.seconds:.0f} s"
        return f"{about}: {self.outcome}: {self.verdict} {names}"


def main(num_launches: int = NUM_LAUNCHES) -> list[Row]:
    """Rows (name, measured, allowed)."""
    launches = series(num_launches)
    outcomes = {kind: Counter(launch.outcome for launch in launches if launch.kind == kind) for kind in KINDS}
    print_table(f"{NUM_RANKS} ranks, lab", outcomes)
    faulty = sum((outcomes[kind] for kind in FAULTS), Counter())
    rows = [
        ("lab: launches with a fault", float(faulty.total()), -float(NUM_LAUNCHES * len(FAULTS))),
        ("lab: named rightly", share(faulty, RIGHT), -95.0),
        ("lab: UNKNOWN with a fault", share(faulty, UNKNOWN), float("inf")),
    ]
    for kind in (QUIET, NEIGHBOUR):
        rows.append((f"lab: {kind}, false alarms", share(outcomes[kind], WRONG), 5.0))
        rows.append((f"lab: {kind}, UNKNOWN", share(outcomes[kind], UNKNOWN), float("inf")))
    rows.append(("lab: seconds of a launch", median(launch.seconds for launch in launches), 60.0))
    return [*rows, *simulated_rows(), ("links: seconds", seconds_of_a_command(), 60.0)]


def simulated_rows() -> list[Row]:
    """Rows on made-up times."""
    rows: list[Row] = []
    for num_ranks in (64, 512):
        outcomes = {kind: Counter[str]() for kind in (*FAULTS, QUIET)}
        for kind in outcomes:
            for number in range(NUM_SIMULATED):
                faults = faults_of(kind, number, num_ranks, SIMULATED_PER_HOST)
                drawn = np.random.default_rng([SEED, num_ranks, number, KINDS.index(kind)])
                verdict = verdict_on(simulated(num_ranks, faults, drawn))
                outcome = outcome_of(
                    faults, verdict.word, [(part.kind, part.ranks, slow_in(part)) for part in verdict.parts]
                )
                if outcome != RIGHT:
                    print(f"{num_ranks} ranks, {kind}, {number}: {outcome}: {verdict.lines[0][:200]}", flush=True)
                outcomes[kind][outcome] += 1
        print_table(f"{num_ranks} ranks, simulated", outcomes)
        faulty = sum((outcomes[kind] for kind in FAULTS), Counter())
        rows.append((f"{num_ranks} ranks: named rightly", share(faulty, RIGHT), -95.0))
        rows.append((f"{num_ranks} ranks: false alarms", share(outcomes[QUIET], WRONG), 5.0))
    return rows


def share(outcomes: Counter[str], outcome: str) -> float:
    """Percent of the launches."""
    return 100 * outcomes[outcome] / outcomes.total()


def print_table(title: str, outcomes: dict[str, Counter[str]]) -> None:
    """The table of the docs."""
    print(f"| {title} | {' | '.join(OUTCOMES)} |\n|---|{'---|' * len(OUTCOMES)}")
    for kind, counts in outcomes.items():
        print(f"| {kind} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |", flush=True)


def series(num_launches: int, kinds: Sequence[str] = KINDS) -> list[Launch]:
    """The launches of each kind that are kept, and those that are missing, made now."""
    file = FOLDER / f"{digest()}.jsonl"
    kept = read(file)
    wanted = [(number, kind) for number in range(num_launches) for kind in kinds]
    missing = [one for one in wanted if one not in {(launch.number, launch.kind) for launch in kept}]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} launches are in {file.relative_to(ROOT)}", flush=True)
    if missing:
        with lab_here() as (lab, folder):
            for number, kind in missing:
                launch, run = launched(lab, folder / f"{number}-{KINDS.index(kind)}", number, kind)
                append(file, launch)
                shutil.copy(run.path, file.parent / f"{file.stem}-{number}-{kind.replace(' ', '-')}.run")
                print(launch.line(), flush=True)
    return [one for one in read(file) if (one.number, one.kind) in wanted]


@contextmanager
def lab_here() -> Iterator[tuple[Lab, Path]]:
    """The lab, and a folder for its launches; a sentence where this machine cannot have it."""
    try:
        with tempfile.TemporaryDirectory(prefix="links") as folder, links_lab(Path(folder)) as lab:
            yield lab, Path(folder)
    except (NoNamespaces, NoCpuLimit) as reason:
        sys.exit(f"bench preflight {reason}")


def launched(lab: Lab, folder: Path, number: int, kind: str, faults: Faults | None = None) -> tuple[Launch, Run]:
    """One launch, and its run."""
    folder.mkdir()
    began = time.monotonic()
    with lab.faults(faults or faults_of(kind, number, NUM_RANKS, RANKS_PER_HOST)):
        record = lab.preflight(folder, *WORDS)
    seconds = time.monotonic() - began
    (file,) = run_files_in(folder)
    named = [(cause["kind"], cause["ranks"], cause["slow_in"]) for cause in record["causes"]]
    return Launch(number, kind, record["verdict"], named, seconds), read_run(file)


def digest() -> str:
    """Of the code that a series depends on."""
    files = sorted(path for pattern in CODE for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def append(file: Path, launch: Launch) -> None:
    """Keep one more, on the disk before this returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.write(json.dumps(asdict(launch)) + "\n")
        opened.flush()
        os.fsync(opened.fileno())


def read(file: Path) -> list[Launch]:
    """The launches of a series; a line that was cut is none."""
    if not file.exists():
        return []
    return [Launch(**json.loads(line)) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def seconds_of_a_command() -> float:
    """What `distbench run links` on eight ranks takes here, imports and all."""
    with tempfile.TemporaryDirectory(prefix="links") as folder:
        words = ("run", "links", "--mesh", f"tp={NUM_RANKS}", "--yes", "--quiet", "--results", folder)
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "distbench", *words], cwd=ROOT, check=True)
        return time.monotonic() - began


def draw(file: Path) -> None:
    """The heat map of a launch of which one rank's cable is slow."""
    with lab_here() as (lab, folder):
        launch, run = launched(lab, folder / "pictured", 0, "one-way", Faults(cable=(PICTURED,)))
    print(launch.line())
    with plots.styled():
        for _, figure in link_figures(run):
            plots.save_figure(figure, file)


def from_words(words: Sequence[str]) -> Iterator[str]:
    """What the command line asks for, done; lines to print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_preflight", description=__doc__)
    parser.add_argument("--launches", type=int, default=NUM_LAUNCHES, help="of each kind")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    parser.add_argument("--simulated", action="store_true", help="only the made-up times")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw one launch's heat map instead")
    given = parser.parse_args(words)
    if given.picture:
        draw(given.picture)
    elif given.simulated:
        yield from map(detail, simulated_rows())
    elif given.kind:
        yield from (one.line() for one in series(given.launches, given.kind))
    else:
        yield from map(detail, main(num_launches=given.launches))


if __name__ == "__main__":
    for told in from_words(sys.argv[1:]):
        print(told)
