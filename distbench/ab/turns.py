"""Launches of two sides in turn (A B B A A B ...), with looks at the verdict in between, until it is settled."""

import contextlib
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distbench.ab.side import WORKING_TREE, Side
from distbench.compare.options import Options
from distbench.compare.verdicts import INCONCLUSIVE, REGRESSION
from distbench.gate.compare_sides import gate
from distbench.gate.outcome import Gated
from distbench.runs.sides import read_side
from distbench.spec.errors import UserError
from distbench.spec.signals import stopped_as_interrupt

# Ends of a launch that leave nothing to compare: the user can fix it, or stopped it.
USER_ERROR, INTERRUPTED = 2, 130
MAX_LOOKS = 4
END_TIMEOUT_S = 15  # for a launch that was asked to end
# Options of `distbench run` that a launch is given anyway.
OWN_OPTIONS = ("--out", "--quiet")


@dataclass(frozen=True)
class Terms:
    """How long to go on.

    Args:
        budget_s: no pair is begun that would probably end after so many seconds.
        looks: after how many pairs to look; each look spends an equal part of alpha.
    """

    max_pairs: int
    budget_s: float
    looks: tuple[int, ...]


@dataclass(frozen=True)
class Settled:
    """What came of it: the last look's verdicts, how many pairs were run, and why no more."""

    gated: Gated
    num_pairs: int
    reason: str


def check_run_arguments(arguments: Sequence[str]) -> None:
    """Refuse options of `distbench run` that each launch gets from here, with a UserError."""
    for option in (argument.partition("=")[0] for argument in arguments):
        if option in OWN_OPTIONS:
            leave = "leave it out (ab takes --out before --)"
            raise UserError(f"{option} stands after --, where each launch gets its own; {leave}")


def looks_of(max_pairs: int, min_launches: int, alpha: float) -> tuple[int, ...]:
    """Up to four looks, evenly from the first that can give a verdict to the last pair.

    Signs of n pairs can be flipped in 2^n ways, so a look at level a needs log2(1 / a) pairs at least; `alpha` is that
    of all looks together. Below `min_launches` pairs there is no verdict.
    """
    for count in range(MAX_LOOKS, 1, -1):
        first = max(min_launches, math.ceil(math.log2(count / alpha)))
        if max_pairs - first >= count - 1:
            step = (max_pairs - first) / (count - 1)
            return tuple(round(first + step * number) for number in range(count))
    return (max_pairs,)


def order_of(pair: int, sides: Sequence[Side]) -> list[Side]:
    """A B, then B A, then A B: what drifts evenly falls on both alike."""
    return list(sides) if pair % 2 == 0 else list(reversed(sides))


def take_turns(
    sides: Sequence[Side],
    run_arguments: Sequence[str],
    out: Path,
    options: Options,
    terms: Terms,
    say: Callable[[str], None],
) -> Settled:
    """Launch both sides in turn until the verdict is settled or the terms are spent.

    Args:
        sides: a and b, checked out.
        run_arguments: of `distbench run`: scenarios and options.
        out: results go to its folders `a` and `b`.
        options: of the gate; its alpha is shared between the looks.
        say: is called with each line of progress.

    Raises:
        UserError: a launch could not work, or `out` cannot be written.
        KeyboardInterrupt: the user stopped it; finished launches stay in `out`.
    """
    share = replace(options, alpha=options.alpha / len(terms.looks))
    started_s, longest_s = time.monotonic(), 0.0
    for done in range(1, terms.max_pairs + 1):
        taken = {side.name: _launch_once(side, run_arguments, out) for side in order_of(done - 1, sides)}
        longest_s = max(longest_s, sum(taken.values()))
        say(f"pair {done} of {terms.max_pairs}: " + ", ".join(f"{n} {taken[n]:.1f} s" for n in sorted(taken)))
        if done in terms.looks and done < terms.max_pairs:
            gated = _look(out, share)
            if settled := settled_by(gated):
                return Settled(gated, done, settled)
        if done < terms.max_pairs and time.monotonic() - started_s + longest_s > terms.budget_s:
            return Settled(_look(out, share), done, f"another pair would not end within {terms.budget_s:g} s")
    return Settled(_look(out, share), terms.max_pairs, f"all {terms.max_pairs} pairs were run")


def settled_by(gated: Gated) -> str | None:
    """Why more launches would change nothing that counts; None while they might."""
    counts = gated.counts
    if counts.get(REGRESSION):
        return "a regression is found"
    if counts.get(INCONCLUSIVE) or not counts:
        return None
    settled = "every case is settled", "nothing can be compared, and more launches would not change that"
    return settled[not gated.num_judged]


def _look(out: Path, options: Options) -> Gated:
    warnings: list[str] = []
    baseline, candidate = (read_side([out / name], name, warnings) for name in ("a", "b"))
    return gate(baseline, candidate, options, warnings)


def _launch_once(side: Side, run_arguments: Sequence[str], out: Path) -> float:
    """The launch's seconds. Cases that fail are the gate's business, not this one's."""
    folder = out / side.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); give another folder") from error
    command = [side.python, "-m", "distbench", "run", *run_arguments, "--out", str(folder.resolve()), "--quiet"]
    began = time.monotonic()
    try:
        # In a session of its own, so that Ctrl-C reaches it once: from here.
        launch = subprocess.Popen(
            command,
            cwd=side.folder,
            env=side.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{side.text()}: {side.python} cannot be started: {error}; give another Python") from error
    said = _wait(launch).decode(errors="replace").strip().splitlines()
    if launch.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if launch.returncode == USER_ERROR or not any(folder.rglob("*.jsonl")):
        last = (said or [f"it ended with {launch.returncode} and said nothing"])[-1]
        raise UserError(f"{side.text()}: {last.removeprefix('distbench: ')}")
    return time.monotonic() - began


def _wait(launch: "subprocess.Popen[bytes]") -> bytes:
    """What it wrote to standard error; where this process is interrupted, it ends its ranks and its run file first."""
    with launch:
        try:
            return launch.communicate()[1]
        except KeyboardInterrupt:
            launch.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.communicate(timeout=END_TIMEOUT_S)
            launch.kill()
            raise


def launch_unchanged(run_arguments: Sequence[str], num_launches: int, out: Path, say: Callable[[str], None]) -> Path:
    """Launch the working tree so many times; the folder of the run files. Raises as `take_turns`."""
    side = Side("unchanged", WORKING_TREE, Path.cwd())
    with stopped_as_interrupt():
        for number in range(1, num_launches + 1):
            took_s = _launch_once(side, run_arguments, out)
            say(f"launch {number} of {num_launches}: {took_s:.1f} s")
    return out / side.name
