"""One sweep from its question to its result, whether it is predicted, measured, or interrupted."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distbench.launch.display import Display, display_for
from distbench.search.child import SweepChild
from distbench.search.explore import ExploredPlans, Limits, no_plan_error
from distbench.search.measured import (
    NUM_FINAL,
    Measurements,
    Rounds,
    changes_of_best,
    claim_folder,
    legal,
    require_folder,
)
from distbench.search.predicted import (
    around_of,
    best_measured,
    code_of,
    facts_of,
    measured_result,
    predicted_around,
    predicted_result,
    predicted_sweep,
    require_some,
)
from distbench.search.prediction import with_memory
from distbench.search.space import Candidate, Setup, count_of, set_up
from distbench.search.text import SweepResult
from distbench.simulate.float8 import patterns_of
from distbench.simulate.hardware_file import Hardware, load_hardware
from distbench.spec import parse_mesh
from distbench.spec.errors import UserError
from distbench.spec.mesh import RANKS_PER_CPU
from distbench.spec.safe_text import count_text, cut

# Amounts with a unit, as the command line takes them: `80GB`, `10min`.

BYTES = {"B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SECONDS = {"s": 1, "min": 60, "h": 3600}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?([A-Za-z]*)")


def amount(text: str, option: str, units: dict[str, int], default: str, most: float) -> float:
    """A positive number of the smallest unit, at most `most` of it; UserError for anything else.

    Args:
        default: the unit of a bare number.
    """
    found = _AMOUNT.fullmatch(text.strip())
    by_name = {name.lower(): size for name, size in units.items()}
    size = by_name.get((found[2] or default).lower()) if found else None
    value = float(found[1]) * size if found and size else math.nan
    if value > most:
        raise UserError(f"{option} {cut(text)} is too much; give at most {most / units[default]:g}{default}")
    if not value > 0:
        known = ", ".join(units)
        raise UserError(f"{option} {cut(text)} cannot be used; give a positive number with one of {known}")
    return value


MONTH_S, MOST_BYTES = 30 * 86400.0, 1e15
Say = Callable[[str], None]


@dataclass(frozen=True)
class AskedSweep:
    """A command line, checked.

    Args:
        memory_bytes: of a device, where --memory says.
        price: of a device and hour.
    """

    setup: Setup
    hardware: Hardware | None
    memory_bytes: float | None
    limits: Limits
    price: float | None
    around: bool
    resume: bool
    quiet: bool
    out: Path

    @classmethod
    def of(cls, scenario: str, out: Path | None, **given: Any) -> "AskedSweep":
        """UserError where something of it cannot be used."""
        budget_s = amount(given["budget"], "--budget", SECONDS, "s", MONTH_S)
        memory = None if given["memory"] is None else amount(given["memory"], "--memory", BYTES, "GB", MOST_BYTES)
        mesh = None if given["mesh"] is None else parse_mesh(given["mesh"])
        if mesh and not given["around_my_plan"]:
            raise UserError("a sweep tries all meshes, so --mesh goes with --around-my-plan only; give --world N")
        hardware = None if given["hardware"] is None else load_hardware(given["hardware"])
        if memory and hardware is None:
            raise UserError("--memory goes with --hardware: what is measured here fits; give --hardware too")
        if given["float8"] is not None and hardware is None:
            raise UserError("--float8 goes with --hardware: it is a rule of predictions; give --hardware too")
        setup = set_up(scenario, given["choices"], given["world"], mesh, given["quick"])
        if given["float8"] is not None and hardware is not None:
            setup = replace(setup, float8=patterns_of(given["float8"], hardware))
        folder = out or Path("results") / "sweep" / f"{setup.entry.name}-{setup.world}"
        require_folder(folder, setup, given["resume"])
        return cls(
            setup=setup,
            hardware=hardware and with_memory(hardware, memory),
            memory_bytes=memory,
            limits=Limits(given["max_plans"], budget_s),
            price=given["price"],
            around=given["around_my_plan"],
            resume=given["resume"],
            quiet=given["quiet"],
            out=folder,
        )


def run_sweep(asked: AskedSweep, say: Say) -> tuple[SweepResult, bool]:
    """What was found, and whether it was interrupted.

    Raises:
        UserError: no plan works or fits, or nothing was known yet when it was interrupted.
    """
    entry = asked.setup.entry
    claim_folder(asked.out, asked.setup)
    if asked.setup.note:
        say(f"{entry.name}: {asked.setup.note}")
    try:
        with SweepChild(entry.file, entry.name, asked.out / "recordings", asked.resume) as recorder:
            try:
                if asked.hardware is not None:
                    return _predicted(asked, asked.hardware, recorder)
                return _measured(asked, recorder)
            finally:
                if asked.resume and asked.hardware is not None:
                    say(f"--resume took {count_text(recorder.num_reused, 'recording')} of the earlier sweep")
                for ended in recorder.again:
                    say(f"a process that records steps was {ended}; it was started once more")
    except KeyboardInterrupt:
        say(f"too early for a ranking; what was recorded and measured is in {asked.out}, and --resume goes on")
        raise


def _predicted(asked: AskedSweep, hardware: Hardware, recorder: SweepChild) -> tuple[SweepResult, bool]:
    explored, interrupted = ExploredPlans(), False
    with display_for("sweep", asked.quiet) as display:
        sweep = predicted_around if asked.around else predicted_sweep
        try:
            sweep(asked.setup, recorder, hardware, asked.limits, RecordingProgress(display), explored)
        except KeyboardInterrupt:
            if not explored.found:
                raise
            interrupted, explored.stopped = True, "it was interrupted; --resume goes on"
    require_some(asked.setup, explored, hardware)
    if not interrupted and is_here(asked.setup, hardware):
        measured = _measured_best(asked, explored)
        interrupted = measured.interrupted
        if measured.final:
            code, stopped = _code(asked, recorder, measured.final[0].candidate, interrupted)
            return best_measured(asked.setup, code, hardware, explored, measured, asked.price), stopped
    code, interrupted = _code(asked, recorder, explored.ranked[0].candidate, interrupted)
    return predicted_result(asked.setup, code, hardware, explored, asked.price), interrupted


def _code(asked: AskedSweep, recorder: SweepChild, candidate: Candidate, interrupted: bool) -> tuple[list[str], bool]:
    """The candidate as code, by a process that has nothing else to answer any more, and whether the sweep was
    interrupted; no code where it is now."""
    try:
        if not interrupted:
            return code_of(asked.setup, recorder, candidate), False
        with SweepChild(asked.setup.entry.file, asked.setup.entry.name) as again:
            return code_of(asked.setup, again, candidate), True
    except KeyboardInterrupt:
        return [], True


def _measured_best(asked: AskedSweep, explored: ExploredPlans) -> Measurements:
    """The best predicted ones, measured in turn."""
    usable = [one.candidate for one in explored.ranked if one.fits is not False]
    best = list(dict.fromkeys([*([explored.written] if explored.written else []), *usable]))[:NUM_FINAL]
    return Rounds(asked.setup, asked.limits, asked.out, asked.resume, asked.quiet).run_last(best)


def is_here(setup: Setup, hardware: Hardware) -> bool:
    """Whether a hardware file is this machine's own, and it can run so many ranks."""
    from distbench.records.machine import machine_name

    if hardware.host is None or hardware.name != machine_name():
        return False
    try:
        require_ranks(setup)
    except UserError:
        return False
    return True


def _measured(asked: AskedSweep, recorder: SweepChild) -> tuple[SweepResult, bool]:
    setup = asked.setup
    require_ranks(setup)
    space = setup.space(facts_of(setup, recorder))
    setup.require_meshes(space)
    written = setup.as_written(space) if asked.around else None
    starting = ([written] if written else space.meshes)[: asked.limits.max_plans]
    fine, wrong = legal(recorder, setup, starting)
    if not fine:
        if written:
            raise UserError(f"the plan as written does not work: {wrong[written]}")
        stopped = asked.limits.reached if len(starting) < len(space.meshes) else ""
        tried = ExploredPlans(
            left_out=wrong, num_legal=count_of(space), unsplit=setup.unsplit_text(space), stopped=stopped
        )
        raise no_plan_error(setup.entry.name, tried, None)

    def changes(best: Sequence[Candidate], most: int) -> list[Candidate]:
        found = around_of(space, written) if written else changes_of_best(space, best)
        works, others = legal(recorder, setup, found[:most])
        wrong.update(others)
        return works

    measured = Rounds(setup, asked.limits, asked.out, asked.resume, asked.quiet).run(fine, changes, written)
    if not measured.plans:
        if measured.interrupted:
            raise KeyboardInterrupt
        why = next(iter(measured.left_out.values()), "no case was measured")
        raise UserError(f"no plan of {setup.entry.name} could be measured: {why}")
    measured.left_out |= wrong
    code, interrupted = _code(asked, recorder, measured.ranked[0].candidate, measured.interrupted)
    return measured_result(setup, code, space, measured, written, asked.price), interrupted


def require_ranks(setup: Setup) -> None:
    """Refuse to measure what this machine cannot run."""
    from distbench.records.machine import accelerator_here, device_count

    name = setup.entry.name
    if "real-size" in setup.entry.tags and accelerator_here()[0] == "cpu":
        raise UserError(f"{name} is a model at its real size, which no CPU runs; predict it: --hardware h100")
    device = accelerator_here()[0]
    most = device_count(device) if device != "cpu" else RANKS_PER_CPU * (os.cpu_count() or 1)
    if setup.world > most:
        what = f"--world {setup.world} is more than the {most} ranks that this machine can measure"
        raise UserError(f"{what}; predict it with --hardware, or give a smaller --world")


class RecordingProgress:
    """Recordings asked for and made, as a display shows cases."""

    def __init__(self, display: Display) -> None:
        self._display, self._asked = display, 0

    def __call__(self, asked: int, answered: int) -> None:
        """So many more."""
        if asked:
            self._asked += asked
            self._display.event({"event": "plan", "num_cases": self._asked})
            self._display.event({"event": "case", "id": "sweep/recording steps"})
        for _ in range(answered):
            self._display.event({"event": "done", "id": "", "status": "ok"})
