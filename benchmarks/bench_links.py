"""What is slow among eight ranks on two hosts is named, what is not is not: see `links_lab.py` for the hosts.

In a launch nothing is slowed, a rank has half of a CPU, or a rank's cable has half of the rate. `./run.sh bench links`:
60 launches of about half a minute. Each is kept in build/links/ as it ends, and a series that was interrupted goes on
where it was, as long as the code is the same. `python -m benchmarks.bench_links --launches N [--kind KIND]` for fewer;
`--picture FILE` draws the heat map of one launch with a slow cable. Needs root and iproute2.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.claims import Claim, Row, detail
from benchmarks.cpu_limit import NoCpuLimit
from benchmarks.links_lab import NUM_RANKS, ROOT, Lab, links_lab
from benchmarks.two_host_lab import NoNamespaces
from distbench.judge.links import LinkVerdict, link_run_of, verdict_of
from distbench.judge.links_text import link_figures
from distbench.records.results_folder import run_files_in
from distbench.records.run_file import Run, read_run
from distbench.show import plots

IS_LONG = True
NUM_LAUNCHES, SEED = 20, 1
NOTHING, RANK, LINK = KINDS = ("nothing", "a rank", "a link")
FOLDER = ROOT / "build" / "links"
# What a series depends on: with other code it begins anew.
CODE = ("benchmarks/*link*.py", "benchmarks/cpu_limit.py", "scenarios/links.py", "distbench/links/*.py",
        "distbench/worker/links/*.py", "distbench/worker/pass_schedule.py", "distbench/ranks/measure.py")  # fmt: skip
PICTURED = 5  # the rank whose cable is slow in the picture
CLAIMS = (
    Claim(
        "8 ranks on two hosts: detected ranks at half speed, detected links at half rate; reports if nothing is slow",
        "{:.0f} %, {:.0f} %; {:.0f} % of {:.0f} launches each",
        "95 %, 95 %; 5 %",
        ("links: a rank named", "links: a link named", "links: anything named", "links: launches"),
    ),
    Claim("`links` on 8 ranks", "{:.0f} s", "60 s", ("links: seconds",)),
)


@dataclass(frozen=True)
class Launch:
    """One launch: what was slowed, and what was named (kind, ranks, quantity, times as long)."""

    number: int
    kind: str
    slow: int
    named: list[tuple[str, list[int], str, float]]
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether what is slow was named, in what it is slow in, and no other rank or link."""
        named = {(kind, *ranks) for kind, ranks, _, _ in self.named}
        if self.kind == NOTHING:
            return not named
        quantity = "compute" if self.kind == RANK else "bandwidth"
        return named == {("rank", self.slow)} and quantity in {one for _, _, one, _ in self.named}

    def line(self) -> str:
        """For who watches."""
        names = [f"{kind} {ranks} {quantity} {times:.2f}" for kind, ranks, quantity, times in self.named]
        slowed = "" if self.kind == NOTHING else f" ({self.slow})"
        said = ("" if self.is_right else "WRONG: ") + ("; ".join(names) or "nothing named")
        return f"{self.number + 1:3d} {self.kind}{slowed}, {self.seconds:.0f} s: {said}"


def main(num_launches: int = NUM_LAUNCHES) -> list[Row]:
    """Rows (name, measured, allowed)."""
    launches = series(num_launches)
    right = {kind: [one.is_right for one in launches if one.kind == kind] for kind in KINDS}
    for kind, of_kind in right.items():
        print(f"{kind} slowed: {sum(of_kind)} of {len(of_kind)} launches right", flush=True)
    share = {kind: 100 * sum(of_kind) / len(of_kind) for kind, of_kind in right.items()}
    return [
        ("links: launches", float(num_launches), -float(NUM_LAUNCHES)),
        ("links: a rank named", share[RANK], -95.0),
        ("links: a link named", share[LINK], -95.0),
        ("links: anything named", 100 - share[NOTHING], 5.0),
        ("links: seconds of a launch in the lab", median(one.seconds for one in launches), 35.0),
        ("links: seconds", seconds_of_a_command(), 60.0),
    ]


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
                launch, run = launched(lab, folder / f"{number}-{kind[-4:]}", number, kind)
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
        sys.exit(f"bench links {reason}")


def launched(lab: Lab, folder: Path, number: int, kind: str, slow: int | None = None) -> tuple[Launch, Run]:
    """One launch, and its run."""
    drawn = random.Random(f"{SEED} {number} {kind}").randrange(NUM_RANKS)
    slow = drawn if slow is None else slow
    folder.mkdir()
    lab.slow_down(rank=slow if kind == RANK else None, link=slow if kind == LINK else None)
    began = time.monotonic()
    lab.run(folder)
    seconds = time.monotonic() - began
    (file,) = run_files_in(folder)
    run = read_run(file)
    links = link_run_of(run)
    assert links is not None and len(set(links.hosts)) == 2, links
    return Launch(number, kind, slow, named_in(verdict_of(links)), seconds), run


def named_in(verdict: LinkVerdict) -> list[tuple[str, list[int], str, float]]:
    """What a verdict names."""
    return [(one.kind, list(one.ranks), one.quantity, round(one.slowdown, 3)) for one in verdict.outliers]


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
        launch, run = launched(lab, folder / "pictured", 0, LINK, PICTURED)
    print(launch.line())
    with plots.styled():
        for _, figure in link_figures(run):
            plots.save_figure(figure, file)


def from_words(words: Sequence[str]) -> Iterator[str]:
    """What the command line asks for, done; lines to print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_links", description=__doc__)
    parser.add_argument("--launches", type=int, default=NUM_LAUNCHES, help="of each kind")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw one launch's heat map instead")
    given = parser.parse_args(words)
    if given.picture:
        draw(given.picture)
    elif given.kind:
        yield from (one.line() for one in series(given.launches, given.kind))
    else:
        yield from map(detail, main(num_launches=given.launches))


if __name__ == "__main__":
    for told in from_words(sys.argv[1:]):
        print(told)
