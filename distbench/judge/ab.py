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
from distbench.spec.errors import INTERRUPTED, UNFORESEEN, USER_ERROR, UserError
from distbench.spec.printable_text import count_text
from distbench.statistics.verdicts import INCONCLUSIVE, PASS, REGRESSION, Options

WORKING_TREE = "."
GIT_TIMEOUT_S = 120
MAX_LOOKS = 4
MAX_OPEN_SHARE = 0.05  # share of cases (at least one) that may remain undecided if no such case looks slower
END_TIMEOUT_S = 15  # for an interrupted launch


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
    """Return the absolute path of an interpreter, by default this process's. Raise UserError if it cannot be started.

    Links are not resolved: in a virtual environment, `python` is a link, and its target is outside the environment.
    """
    if text is None:
        return sys.executable
    interpreter = shutil.which(text)
    if interpreter is None:
        raise UserError(f"{option} {text} cannot be started; give the path of a Python with torch")
    return str(Path(interpreter).absolute())


@contextlib.contextmanager
def checked_out(sides: Sequence[Side]) -> Iterator[list[Side]]:
    """Check out each side's revision in a separate worktree, and remove the worktrees at the end, also after a signal.

    Raises:
        KeyboardInterrupt: SIGTERM or SIGHUP.
        UserError: the folder is not in a git repository, or the revision does not exist.
    """
    here, root, commits = Path.cwd(), None, {}
    if refs := [side.ref for side in sides if side.ref != WORKING_TREE]:
        error = "this folder is not in a git repository; change to a repository, or give . for both sides"
        root = Path(_git(["rev-parse", "--show-toplevel"], here, error))
        give = "give a branch, tag or commit, or . for the working tree"
        for ref in refs:
            error = f"{ref!r} is not a revision of this git repository; {give}"
            commits[ref] = _git(["rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"], root, error)
    with stopped_as_interrupt(), contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="distbench-ab-")))
        ready_sides = []
        for side in sides:
            if root is None or side.ref == WORKING_TREE:
                ready_sides.append(side)
                continue
            tree = folder / side.name
            undo.callback(_git, ["worktree", "remove", "--force", "--force", str(tree)], root)
            _git(["worktree", "add", "--detach", str(tree), commits[side.ref]], root, "git worktree failed: ")
            side_folder = tree / here.relative_to(root)
            if not side_folder.is_dir():
                raise UserError(
                    f"{side.ref} has no folder {here.relative_to(root)}; run ab from a folder of both revisions"
                )
            ready_sides.append(replace(side, folder=side_folder, commit=commits[side.ref]))
        yield ready_sides


def _git(arguments: list[str], folder: Path, error: str = "") -> str:
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
    """

    max_pairs: int
    budget_s: float
    looks: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Settled:
    """The last check's verdicts, the number of pairs, and the reason to stop."""

    gated: Gated
    num_pairs: int
    reason: str


def check_run_arguments(arguments: Sequence[str]) -> None:
    """Raise UserError for options of `distbench run` that ab sets itself."""
    for option in (argument.partition("=")[0] for argument in arguments):
        if option in ("--out", "--results", "--runs", "--quiet"):
            leave = "give --results before --, or leave out this option"
            raise UserError(f"{option} is not allowed after --, since ab sets this option; {leave}")


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


def run_pairs(
    sides: Sequence[Side],
    run_arguments: Sequence[str],
    out: Path,
    options: Options,
    terms: Terms,
    show: Callable[[str], None],
) -> Settled:
    """Launch both sides alternately until the verdict is clear or a limit is reached.

    Args:
        sides: sides a and b, checked out.
        run_arguments: scenarios and options of `distbench run`.
        out: the folder that contains the results folders `a` and `b`.
        options: options of the gate; alpha is divided equally between the checks.
        show: receives each line of progress.

    Raises:
        UserError: a launch failed because of its options, or `out` cannot be written.
        KeyboardInterrupt: interrupted by the user; files of finished launches remain in `out`.
    """
    share = replace(options, alpha=options.alpha / len(terms.looks))
    started_s, longest_s = time.monotonic(), 0.0
    for done in range(1, terms.max_pairs + 1):
        seconds = {side.name: _launch_once(side, run_arguments, out) for side in order_of(done, sides, terms.seed)}
        longest_s = max(longest_s, sum(seconds.values()))
        show(f"pair {done} of {terms.max_pairs}: " + ", ".join(f"{n} {seconds[n]:.1f} s" for n in sorted(seconds)))
        if done == 1:
            show(_cost(longest_s, terms))
        if done in terms.looks and done < terms.max_pairs:
            gated = _look(out, share)
            if reason := settled_by(gated, terms.max_pairs - done):
                return Settled(gated, done, reason)
        if done < terms.max_pairs and time.monotonic() - started_s + longest_s > terms.budget_s:
            return Settled(
                _look(out, share), done, f"another pair would take longer than --max-time {terms.budget_s:g}"
            )
    return Settled(_look(out, share), terms.max_pairs, f"all {terms.max_pairs} pairs were run")


def _cost(pair_s: float, terms: Terms) -> str:
    """Predict from the first pair's time when the first check and the last pair within the budget end."""
    first, most = terms.looks[0], min(terms.max_pairs, max(1, int(terms.budget_s / pair_s)) if pair_s else math.inf)
    look = f"first check of the verdict after {first} pairs ({_minutes(first * pair_s)})"
    if most < first:
        look = f"--max-time {terms.budget_s:g} allows about {most:g} pairs, fewer than the {first} of the first check"
    return f"{pair_s:.1f} s per pair: {look}; at most {most:g} pairs take {_minutes(most * pair_s)}"


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


def _look(out: Path, options: Options) -> Gated:
    warnings: list[str] = []
    baseline, candidate = (read_side([out / name], name, warnings) for name in ("a", "b"))
    return gate(baseline, candidate, options, warnings)


def _launch_once(side: Side, run_arguments: Sequence[str], out: Path) -> float:
    """Run a launch and return its duration in seconds. The gate reports cases that fail."""
    folder = out / side.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--results {out} cannot be written ({error.strerror}); give another folder") from error
    earlier_files = set(folder.rglob("*.jsonl"))
    # A side may have an older distbench, which knows only this older name.
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
        raise UserError(f"{side.text()}: {side.python} cannot be started: {error}; give another Python") from error
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
        raise UserError(f"{side.text()}: launch killed by {name} (SIGKILL: out of memory?); {advice}")
    if launch.returncode in (USER_ERROR, UNFORESEEN) or not set(folder.rglob("*.jsonl")) - earlier_files:
        # The last message with all lines of the message, or the last line of other output.
        _, prefix, message = f"\n{output}".rpartition("\ndistbench: ")
        last = message if prefix else output.rpartition("\n")[2]
        last = last or f"exit code {launch.returncode}, without a run file or message"
        raise UserError(f"{side.text()}: {last}")
    return time.monotonic() - began


def launch_unchanged(run_arguments: Sequence[str], num_launches: int, out: Path, show: Callable[[str], None]) -> Path:
    """Launch the working tree `num_launches` times; return the folder of the run files. Raise the errors of
    `run_pairs`."""
    side = Side("unchanged", WORKING_TREE, Path.cwd())
    with stopped_as_interrupt():
        for number in range(1, num_launches + 1):
            took_s = _launch_once(side, run_arguments, out)
            show(f"launch {number} of {num_launches}: {took_s:.1f} s")
    return out / side.name
