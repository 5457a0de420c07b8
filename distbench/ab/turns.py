"""Launches of two sides in turn, each pair in an order of its own, with looks in between, until it is settled."""

import math
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distbench.ab.side import WORKING_TREE, Side
from distbench.compare.options import Options
from distbench.compare.verdicts import INCONCLUSIVE, PASS, REGRESSION
from distbench.gate.compare_sides import gate
from distbench.gate.outcome import CaseVerdict, Gated
from distbench.processes import start_supervised, stop_supervised
from distbench.runs.sides import read_side
from distbench.spec.errors import UserError
from distbench.spec.signals import Stop, noted_stop, stopped_as_interrupt

# Ends of a launch that leave nothing to compare: the user can fix it, distbench itself failed, or the user stopped it.
USER_ERROR, UNFORESEEN, INTERRUPTED = 2, 70, 130
MAX_LOOKS = 4
MAX_OPEN_SHARE = 0.05  # of the compared cases that may stay open where nothing looks slower; one may in any case
END_TIMEOUT_S = 15  # for a launch that was asked to end
# Options of `distbench run` that a launch is given anyway.
OWN_OPTIONS = ("--out", "--quiet")


@dataclass(frozen=True)
class Terms:
    """How long to go on.

    Args:
        budget_s: no pair is begun that would probably end after so many seconds.
        looks: after how many pairs to look; each look spends an equal part of alpha.
        seed: of the coin that gives each pair its order.
    """

    max_pairs: int
    budget_s: float
    looks: tuple[int, ...]
    seed: int


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


def looks_of(max_pairs: int, options: Options) -> tuple[int, ...]:
    """Up to four looks, evenly from the first that can give a verdict at its share of alpha to the last pair."""
    for count in range(MAX_LOOKS, 1, -1):
        first = replace(options, alpha=options.alpha / count).least_launches(paired=True)
        if max_pairs - first >= count - 1:
            step = (max_pairs - first) / (count - 1)
            return tuple(round(first + step * number) for number in range(count))
    return (max_pairs,)


def order_of(pair: int, sides: Sequence[Side], seed: int) -> list[Side]:
    """Either order by a fair coin of the pair's own, always the same for the same seed.

    Only so are a pair's launches exchangeable whatever disturbs them. A fixed order (A B, B A, ...) is not: what comes
    back every second pair falls on one side alone.
    """
    return list(random.Random(f"{seed} pair {pair}").sample(list(sides), k=2))


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
        taken = {side.name: _launch_once(side, run_arguments, out) for side in order_of(done, sides, terms.seed)}
        longest_s = max(longest_s, sum(taken.values()))
        say(f"pair {done} of {terms.max_pairs}: " + ", ".join(f"{n} {taken[n]:.1f} s" for n in sorted(taken)))
        if done == 1:
            say(_cost(longest_s, terms))
        if done in terms.looks and done < terms.max_pairs:
            gated = _look(out, share)
            if settled := settled_by(gated, terms.max_pairs - done):
                return Settled(gated, done, settled)
        if done < terms.max_pairs and time.monotonic() - started_s + longest_s > terms.budget_s:
            return Settled(_look(out, share), done, f"another pair would not end within {terms.budget_s:g} s")
    return Settled(_look(out, share), terms.max_pairs, f"all {terms.max_pairs} pairs were run")


def _cost(pair_s: float, terms: Terms) -> str:
    """What the rest will take, by the first pair; where a budget ends it sooner, until then."""
    first, most = terms.looks[0], min(terms.max_pairs, max(1, int(terms.budget_s / pair_s)) if pair_s else math.inf)
    look = f"the first look is after {first}, {_minutes(first * pair_s)} after the start"
    if most < first:
        look = f"--max-time {terms.budget_s:g} ends it after about {most:g}, before the first look after {first}"
    return f"a pair takes {pair_s:.1f} s: {look}; at most {most:g} pairs take {_minutes(most * pair_s)}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def settled_by(gated: Gated, num_left: int) -> str | None:
    """Why up to `num_left` more pairs would change nothing that counts; None while they might."""
    counts = gated.counts
    if counts.get(REGRESSION):
        return "a regression is found"
    if counts.get(INCONCLUSIVE):
        return _out_of_reach(gated, num_left)
    if not counts:
        return None
    settled = "every case is settled", "nothing can be compared, and more launches would not change that"
    return settled[not gated.num_judged]


def _out_of_reach(gated: Gated, num_left: int) -> str | None:
    """Where nearly every case passed, and the pairs left would probably not settle the few that look no slower."""
    still_open = [case for case in gated.cases if case.verdict == INCONCLUSIVE]
    allowed = max(1, int(MAX_OPEN_SHARE * gated.num_judged))
    if not gated.counts.get(PASS) or len(still_open) > allowed or not all(map(_looks_no_slower, still_open)):
        return None
    if not all(_needs(case) > num_left for case in still_open):
        return None
    few = "1 case is" if len(still_open) == 1 else f"{len(still_open)} cases are"
    return f"{few} open, looking no slower than the tolerance, and would need more than the {num_left} pairs left"


def _looks_no_slower(case: CaseVerdict) -> bool:
    return not case.suspected and all(metric.change < metric.tolerance for metric in case.metrics)


def _needs(case: CaseVerdict) -> float:
    """Further pairs that would settle a case, were what was seen the truth."""
    still_open = [metric.num_more for metric in case.metrics if metric.verdict == INCONCLUSIVE]
    return max(math.inf if count is None else count for count in still_open)


def _look(out: Path, options: Options) -> Gated:
    warnings: list[str] = []
    baseline, candidate = (read_side([out / name], name, warnings) for name in ("a", "b"))
    return gate(baseline, candidate, options, warnings)


def _last_sentence(said: Sequence[str]) -> str:
    """What a command said last, all of its lines; empty where it said nothing."""
    begins = [index for index, line in enumerate(said) if line.startswith("distbench: ")]
    return "\n".join(said[begins[-1] if begins else -1 :])


def _launch_once(side: Side, run_arguments: Sequence[str], out: Path) -> float:
    """The launch's seconds. Cases that fail are the gate's business, not this one's."""
    folder = out / side.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); give another folder") from error
    earlier = set(folder.rglob("*.jsonl"))
    command = [side.python, "-m", "distbench", "run", *run_arguments, "--out", str(folder.resolve()), "--quiet"]
    began = time.monotonic()
    try:
        # A signal while it starts is answered when there is a launch to end.
        with noted_stop() as stop:
            # In a session of its own, so that Ctrl-C reaches it once: from here.
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
    said = _wait(launch, stop).decode(errors="replace").strip().splitlines()
    if launch.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if launch.returncode < 0:
        name, kept = signal.Signals(-launch.returncode).name, f"launches that ended before it are in {out}"
        raise UserError(f"{side.text()}: its launch was killed by {name} (SIGKILL: memory may be short); {kept}")
    if launch.returncode in (USER_ERROR, UNFORESEEN) or not set(folder.rglob("*.jsonl")) - earlier:
        last = _last_sentence(said) or f"it ended with {launch.returncode}, no run file and no message"
        raise UserError(f"{side.text()}: {last.removeprefix('distbench: ')}")
    return time.monotonic() - began


def _wait(launch: "subprocess.Popen[bytes]", stop: Stop) -> bytes:
    """What it wrote to standard error; where this process is interrupted, it ends its ranks and its run file first.

    Args:
        stop: whether it was while the launch started.
    """
    with launch:
        try:
            if stop.asked:
                raise KeyboardInterrupt
            return launch.communicate()[1]
        except KeyboardInterrupt:
            stop_supervised(launch, END_TIMEOUT_S)
            raise


def launch_unchanged(run_arguments: Sequence[str], num_launches: int, out: Path, say: Callable[[str], None]) -> Path:
    """Launch the working tree so many times; the folder of the run files. Raises as `take_turns`."""
    side = Side("unchanged", WORKING_TREE, Path.cwd())
    with stopped_as_interrupt():
        for number in range(1, num_launches + 1):
            took_s = _launch_once(side, run_arguments, out)
            say(f"launch {number} of {num_launches}: {took_s:.1f} s")
    return out / side.name
