"""Comparison of two revisions or environments: alternating launches in random order until the verdict is clear."""

import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distbench.judge.gate import CaseVerdict, Gated, gate
from distbench.processes import start_supervised, stop_supervised
from distbench.processes.signals import noted_stop, stopped_as_interrupt
from distbench.records.baselines import read_side
from distbench.records.launches import Launch
from distbench.records.results_folder import run_files_in
from distbench.spec.errors import INTERRUPTED, UNFORESEEN, USER_ERROR, UserError
from distbench.spec.file_io import writing
from distbench.spec.printable_text import count_text
from distbench.statistics.verdicts import INCONCLUSIVE, PASS, REGRESSION, Options

WORKING_TREE = "."
GIT_TIMEOUT_S = 120
MAX_LOOKS = 4
MAX_OPEN_SHARE = 0.05  # share of cases (at least one) that may remain undecided if no such case looks slower
END_TIMEOUT_S = 15  # for an interrupted launch
PAIRS_PER_HALVING = 5  # of a bisection, usually at most


@dataclass(frozen=True)
class Side:
    """One side of the comparison: code, Python and environment.

    Args:
        name: "a" or "b".
        ref: the user's name of the side: a git revision, or "." for the working tree.
        folder: folder of the side's code. Launches run in this folder, and import from this folder first.
        python: the interpreter with the torch to measure.
        commit: the revision's full hash; None for the working tree.
    """

    name: str
    ref: str
    folder: Path
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None

    def environment(self) -> dict[str, str]:
        """The environment of the side's launches: this process's environment, the side's variables, and its folder
        first on the import path."""
        paths = filter(None, [str(self.folder), os.environ.get("PYTHONPATH")])
        return {**os.environ, **self.variables, "PYTHONPATH": os.pathsep.join(paths)}

    def text(self) -> str:
        """`a: main (1a2b3c4d), NCCL_ALGO=Tree`."""
        parts = [f"{self.ref} ({self.commit[:8]})" if self.commit else "the working tree"]
        parts += [f"{name}={value}" for name, value in self.variables.items()]
        parts += [self.python] if self.python != sys.executable else []
        return f"{self.name}: {', '.join(parts)}"


def parse_variables(texts: Sequence[str], option: str) -> dict[str, str]:
    """`["NCCL_ALGO=Tree"]` to a mapping. Raise UserError for a text that is not NAME=VALUE."""
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{option} {text!r} is not NAME=VALUE, such as {option} NCCL_ALGO=Tree")
        variables[name] = value
    return variables


def python_at(text: str | None, option: str) -> str:
    """Return the absolute path of an interpreter, by default this process's. Raise UserError if the interpreter cannot
    be started.

    Links are not resolved: in a virtual environment, `python` is a link, and its target is outside the environment.
    """
    if text is None:
        return sys.executable
    interpreter = shutil.which(text)
    if interpreter is None:
        raise UserError(f"{option} {text} cannot be started; give the path of a Python with torch")
    return str(Path(interpreter).absolute())


class Worktrees:
    """Revisions of a git repository, each checked out in a separate worktree. `worktrees` removes them at the end."""

    def __init__(self, folder: Path, undo: contextlib.ExitStack) -> None:
        """Check out below `folder`; `undo` removes the worktrees.

        Raises:
            UserError: the current folder is not in a git repository.
        """
        error = "this folder is not in a git repository; change to a repository, or give . for both sides"
        self.here = Path.cwd()
        self.root = Path(git(["rev-parse", "--show-toplevel"], self.here, error))
        self._folder, self._undo = folder, undo

    def commit_of(self, ref: str) -> str:
        """Return a revision's full hash. Raise UserError if the revision does not exist."""
        give = "give a branch, tag or commit, or . for the working tree"
        error = f"{ref!r} is not a revision of this git repository; {give}"
        return git(["rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"], self.root, error)

    def check_out(self, side: Side, commit: str) -> Side:
        """Return the side with the folder of its new worktree.

        Raises:
            LaunchFailed: the commit does not have the current folder.
            UserError: git cannot add a worktree.
        """
        tree, inside = self._folder / side.name, self.here.relative_to(self.root)
        self._undo.callback(git, ["worktree", "remove", "--force", "--force", str(tree)], self.root)
        git(["worktree", "add", "--detach", str(tree), commit], self.root, "git worktree failed: ")
        side = replace(side, folder=tree / inside, commit=commit)
        if not side.folder.is_dir():
            raise LaunchFailed(side, f"this revision has no folder {inside}; run ab from a folder of both revisions")
        return side


class LaunchFailed(UserError):
    """A launch of one side failed, or cannot be started, for the reason `why`."""

    def __init__(self, side: Side, why: str) -> None:
        super().__init__(f"{side.text()}: {why}")
        self.side, self.why = side, why


@contextlib.contextmanager
def worktrees() -> Iterator[Worktrees]:
    """Remove the worktrees at the end, also after a signal.

    Raises:
        KeyboardInterrupt: SIGTERM or SIGHUP.
        UserError: the current folder is not in a git repository.
    """
    with stopped_as_interrupt(), contextlib.ExitStack() as undo:
        yield Worktrees(Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="distbench-ab-"))), undo)


@contextlib.contextmanager
def checked_out(sides: Sequence[Side]) -> Iterator[list[Side]]:
    """Check out each side's revision; raises the errors of `worktrees` and `Worktrees`."""
    if all(side.ref == WORKING_TREE for side in sides):
        with stopped_as_interrupt():
            yield list(sides)
        return
    with worktrees() as trees:
        commits = {side.ref: trees.commit_of(side.ref) for side in sides if side.ref != WORKING_TREE}
        yield [trees.check_out(side, commits[side.ref]) if side.ref in commits else side for side in sides]


def git(arguments: list[str], folder: Path, error: str = "") -> str:
    """Return git's output. If git fails, raise a UserError of `error`; if `error` ends with ": ", append git's last
    line."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise UserError(f"git cannot be run: {problem}") from problem
    if done.returncode and error:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise UserError(error + reason * error.endswith(": "))
    return done.stdout.strip()


@dataclass(frozen=True)
class Terms:
    """The limits of a comparison.

    Args:
        budget_s: time limit, seconds; a pair that would probably end later does not start.
        looks: numbers of pairs after which the verdict is checked; each check uses an equal part of alpha.
        seed: seed for the random order of each pair.
        num_commits: commits of a bisection after the good one; 0 for the comparison of two revisions.
    """

    max_pairs: int
    budget_s: float
    looks: tuple[int, ...]
    seed: int
    num_commits: int = 0

    @property
    def num_launches(self) -> tuple[int, int]:
        """The usual fewest and most launches, without the time limit."""
        halvings = max(1, math.ceil(math.log2(self.num_commits))) if self.num_commits else 0
        most = max(self.max_pairs, self.looks[0] + PAIRS_PER_HALVING * halvings)
        return 2 * (self.looks[0] + halvings), 2 * most

    def cost_text(self, launch_s: float | None) -> str:
        """Predict launches and time.

        Args:
            launch_s: duration of one launch in seconds; None if unknown.
        """
        fewest, most = self.num_launches
        limit = f"at most {_minutes(self.budget_s)} (--max-time)"
        # A bisection on a noisy machine measures further pairs.
        usually = "usually " if self.num_commits else ""
        launches = usually + (f"{fewest} to {most} launches" if most > fewest else f"{most} launches")
        if launch_s is None:
            return f"cost: {launches}, unknown time; {limit}. The first pair shows the time of a launch"
        if fewest * launch_s > self.budget_s:
            allowed = f"cost: {limit}, which allows about {self.budget_s / launch_s:.0f} launches"
            return f"{allowed}. A verdict needs {fewest} launches of {launch_s:.1f} s: give --max-time"
        first, last = _minutes(fewest * launch_s), _minutes(min(most * launch_s, self.budget_s))
        return f"cost: {launches} of {launch_s:.1f} s, {first if first == last else f'{first} to {last}'}; {limit}"


@dataclass(frozen=True)
class Settled:
    """The last check's verdicts, the number of pairs, the reason to stop, and the pairs."""

    gated: Gated
    num_pairs: int
    reason: str
    pairs: Sequence["Pair"]


def check_run_arguments(arguments: Sequence[str]) -> None:
    """Raise UserError for options of `distbench run` that ab sets itself."""
    for option in (argument.partition("=")[0] for argument in arguments):
        if option in ("--out", "--results", "--runs", "--quiet"):
            leave = "give --results before --, or leave out this option"
            raise UserError(f"{option} is not allowed after --, because ab sets this option; {leave}")


def looks_of(max_pairs: int, options: Options) -> tuple[int, ...]:
    """Pairs after which to check the verdict: up to four, evenly from the first possible verdict to the last pair."""
    for count in range(MAX_LOOKS, 1, -1):
        first = replace(options, alpha=options.alpha / count).least_launches(paired=True)
        if max_pairs - first >= count - 1:
            step = (max_pairs - first) / (count - 1)
            return tuple(round(first + step * number) for number in range(count))
    return (max_pairs,)


def order_of(pair: int, sides: Sequence[Side], seed: int) -> list[Side]:
    """The random order of a pair; equal seeds give equal orders.

    A random order makes a pair's launches exchangeable. In a fixed order (A B, B A, ...), a disturbance of every second
    launch pair could slow one side only.
    """
    return list(random.Random(f"{seed} pair {pair}").sample(list(sides), k=2))


@dataclass
class Pair:
    """The launches of both sides, and their durations.

    Args:
        seconds: side's name to the duration of its launch.
        warnings: sentences on the files.
    """

    baseline: list[Launch] = field(default_factory=list)
    candidate: list[Launch] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        """The duration of both launches in seconds."""
        return sum(self.seconds.values())

    @property
    def text(self) -> str:
        """`a 10.1 s, b 10.4 s`."""
        return ", ".join(f"{name} {self.seconds[name]:.1f} s" for name in sorted(self.seconds))


def launch_pair(number: int, sides: Sequence[Side], run_arguments: Sequence[str], out: Path, seed: int) -> Pair:
    """Launch both sides once, in random order.

    Args:
        number: number of the pair, from 1.
        sides: baseline and candidate, checked out.
        run_arguments: scenarios and options of `distbench run`.
        out: folder that contains a results folder per side.

    Raises:
        LaunchFailed: a launch failed because of its options or its code.
        UserError: `out` cannot be written.
        KeyboardInterrupt: interrupted by the user; files of finished launches remain in `out`.
    """
    pair = Pair()
    for side in order_of(number, sides, seed):
        pair.seconds[side.name], files = launch_once(side, run_arguments, out)
        (pair.baseline if side is sides[0] else pair.candidate).extend(read_side(files, side.name, pair.warnings))
    return pair


def run_pairs(launch: Callable[[int], Pair], options: Options, terms: Terms, show: Callable[[str], None]) -> Settled:
    """Launch pairs until the verdict is clear or a limit is reached.

    Args:
        launch: launches the pair with this number, as `launch_pair`; its errors are raised.
        options: options of the gate; alpha is divided equally between the checks.
        show: receives each line of progress.
    """
    share, pairs = replace(options, alpha=options.alpha / len(terms.looks)), list[Pair]()

    def settled(gated: Gated, reason: str) -> Settled:
        return Settled(gated, len(pairs), reason, pairs)

    for done in range(1, terms.max_pairs + 1):
        pairs.append(launch(done))
        show(f"pair {done} of {terms.max_pairs}: {pairs[-1].text}")
        if done == 1:
            show(terms.cost_text(pairs[0].total_s / 2))
        if done in terms.looks and done < terms.max_pairs:
            gated = _look(pairs, share)
            if reason := settled_by(gated, terms.max_pairs - done):
                return settled(gated, reason)
        if done < terms.max_pairs and is_over(pairs, terms.budget_s):
            over = f"another pair would take longer than --max-time {terms.budget_s:g}"
            return settled(_look(pairs, share), over)
    return settled(_look(pairs, share), f"all {terms.max_pairs} pairs were run")


def is_over(pairs: Sequence[Pair], budget_s: float) -> bool:
    """Whether another pair would probably end after the time limit."""
    times_s = [pair.total_s for pair in pairs]
    return sum(times_s) + max(times_s) > budget_s


def _look(pairs: Sequence[Pair], options: Options) -> Gated:
    baseline = [launch for pair in pairs for launch in pair.baseline]
    candidate = [launch for pair in pairs for launch in pair.candidate]
    return gate(baseline, candidate, options, [warning for pair in pairs for warning in pair.warnings])


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def settled_by(gated: Gated, num_left: int) -> str | None:
    """Return the reason why up to `num_left` more pairs would not change the outcome; None if they might change it."""
    counts = gated.counts
    if counts.get(REGRESSION):
        return "found a regression"
    if not counts:
        return None
    still_open = [case for case in gated.cases if case.verdict == INCONCLUSIVE]
    if not still_open:
        nothing = "no case is comparable, and more launches would not help"
        return "all cases are decided" if gated.num_judged else nothing
    # Nearly every case passed. The remaining pairs would probably not decide the few open cases, which do not look
    # slower.
    allowed = max(1, int(MAX_OPEN_SHARE * gated.num_judged))
    may_end = bool(counts.get(PASS)) and len(still_open) <= allowed
    if not may_end or any(case.suspected or case.excess >= 0 or _needs(case) <= num_left for case in still_open):
        return None
    few = f"{count_text(len(still_open), 'case')} {'is' if len(still_open) == 1 else 'are'}"
    return f"{few} undecided, measured within the tolerance, and would need more than {num_left} further pairs"


def _needs(case: CaseVerdict) -> float:
    """The number of further pairs that would decide a case if the true changes equal the measured ones."""
    still_open = [metric.num_more for metric in case.metrics if metric.verdict == INCONCLUSIVE]
    return max(math.inf if count is None else count for count in still_open)


def launch_once(side: Side, run_arguments: Sequence[str], out: Path) -> tuple[float, list[Path]]:
    """Run a launch, and return its duration in seconds and its run files. The gate reports cases that fail."""
    folder = out / side.name
    with writing(f"--results {out}", "folder"):
        folder.mkdir(parents=True, exist_ok=True)
    earlier_files = set(run_files_in(folder))
    # A side may have an older distbench, which accepts only this older name.
    command = [side.python, "-m", "distbench", "run", *run_arguments, "--out", str(folder.resolve()), "--quiet"]
    began = time.monotonic()
    try:
        # A signal during the start is handled once the launch exists.
        with noted_stop() as stop:
            # In a separate session, so that Ctrl-C reaches the launch only once, through this process.
            launch = start_supervised(
                command,
                environment=side.environment(),
                grace_s=END_TIMEOUT_S,
                cwd=side.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
    except (OSError, ValueError) as error:
        raise LaunchFailed(side, f"{side.python} cannot be started: {error}; give another Python") from error
    with launch:
        try:
            if stop.is_requested:
                raise KeyboardInterrupt
            output = launch.communicate()[1].decode(errors="replace").strip()
        except KeyboardInterrupt:
            stop_supervised(launch, END_TIMEOUT_S)  # the launch ends its ranks and closes its run file
            raise
    if launch.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if launch.returncode < 0:
        name, advice = signal.Signals(-launch.returncode).name, f"earlier launches are in {out}"
        raise LaunchFailed(side, f"launch killed by {name} (SIGKILL: out of memory?); {advice}")
    files = [path for path in run_files_in(folder) if path not in earlier_files]
    if launch.returncode in (USER_ERROR, UNFORESEEN) or not files:
        # The last message with all lines of the message, or the last line of other output.
        _, prefix, message = f"\n{output}".rpartition("\ndistbench: ")
        last = message if prefix else output.rpartition("\n")[2]
        last = last or f"exit code {launch.returncode}, without a run file or message"
        raise LaunchFailed(side, last)
    return time.monotonic() - began, files


def launch_unchanged(run_arguments: Sequence[str], num_launches: int, out: Path, show: Callable[[str], None]) -> Path:
    """Launch the working tree `num_launches` times; return the folder of the run files. Raise the errors of
    `run_pairs`."""
    side = Side("unchanged", WORKING_TREE, Path.cwd())
    with stopped_as_interrupt():
        for number in range(1, num_launches + 1):
            took_s, _ = launch_once(side, run_arguments, out)
            show(f"launch {number} of {num_launches}: {took_s:.1f} s")
    return out / side.name
