"""One sweep from its request to its result, predicted or measured, also after an interrupt."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distbench.launch.display import display_for
from distbench.search.measured import NUM_FINAL, Rounds, changes_of_best, claim_folder, require_folder
from distbench.search.predicted import Predictor, no_plan_error, predict, require_fitting, with_memory
from distbench.search.space import Candidate, Setup, set_up
from distbench.search.sweep_child import PlanCode, SweepChild, code_of, facts_of, legal
from distbench.search.sweep_result import COST, TOKENS, Limits, Prediction, SweepResult, SweepState, plans_of, result_of
from distbench.search.sweep_text import best_so_far
from distbench.simulate.compile_float8 import patterns_of
from distbench.simulate.hardware_file import Hardware, load_hardware
from distbench.spec import parse_mesh
from distbench.spec.assumptions import Assumption, assumptions_of
from distbench.spec.errors import UserError
from distbench.spec.mesh import RANKS_PER_CPU
from distbench.spec.printable_text import count_text, cut

BYTES = {"B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MOST_BYTES = 1e15


def amount(text: str, option: str, units: dict[str, int], default: str, most: float) -> float:
    """Return an amount such as `80GB` in the smallest unit; UserError unless above 0 and at most `most`.

    Args:
        default: the unit of a bare number.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([A-Za-z]*)", text.strip())
    by_name = {name.lower(): size for name, size in units.items()}
    size = by_name.get((parts[2] or default).lower()) if parts else None
    value = float(parts[1]) * size if parts and size else math.nan
    if value > most:
        raise UserError(f"{option} {cut(text)} is too large; give at most {most / units[default]:g}{default}")
    if not value > 0:
        raise UserError(f"{option} {cut(text)} is not valid; give a positive number and a unit ({', '.join(units)})")
    return value


@dataclass(frozen=True)
class SweepRequest:
    """A checked command line.

    Args:
        hardware: the hardware file with the memory of --memory and --headroom; None to measure.
        price: price per device-hour.
        objective, max_step_s: as in SweepState.
    """

    setup: Setup
    hardware: Hardware | None
    limits: Limits
    price: float | None
    objective: str
    max_step_s: float
    around: bool
    resume: bool
    quiet: bool
    out: Path
    assume: Mapping[str, Assumption]

    @classmethod
    def of(cls, scenario: str, out: Path | None, **given: Any) -> "SweepRequest":
        """Raise UserError if options contradict each other."""
        memory = None if given["memory"] is None else amount(given["memory"], "--memory", BYTES, "GB", MOST_BYTES)
        mesh = None if given["mesh"] is None else parse_mesh(given["mesh"])
        if mesh and not given["around_my_plan"]:
            raise UserError(
                "a sweep tries all meshes, so --mesh needs --around-my-plan; add this option, or give --world N"
            )
        hardware = None if given["hardware"] is None else load_hardware(given["hardware"])
        if memory and hardware is None:
            raise UserError(
                "--memory needs --hardware, because a plan that does not fit is not measured; add --hardware"
            )
        headroom = (
            None if given["headroom"] is None else amount(given["headroom"], "--headroom", BYTES, "GB", MOST_BYTES)
        )
        for option, name in (("--headroom", "headroom"), ("--max-step", "max_step_s"), ("--objective", "objective")):
            if given[name] not in (None, TOKENS) and hardware is None:
                raise UserError(f"{option} needs --hardware, because it chooses among predictions; add --hardware")
        if given["objective"] == COST and given["price"] is None:
            raise UserError("--objective cost needs the price of a device; add --price AMOUNT")
        if given["float8"] is not None and hardware is None:
            raise UserError("--float8 needs --hardware, because float8 is a rule of predictions; add --hardware")
        if given["assume"] and hardware is None:
            raise UserError("--assume needs --hardware, because measured steps have real values; add --hardware")
        setup = set_up(scenario, given["choices"], given["world"], mesh, given["quick"])
        if given["float8"] is not None and hardware is not None:
            setup = replace(setup, float8=patterns_of(given["float8"], hardware))
        folder = out or Path("results") / "sweep" / f"{setup.entry.name}-{setup.world}"
        require_folder(folder, setup, given["resume"])
        return cls(
            setup=setup,
            hardware=hardware and with_memory(hardware, memory, headroom),
            limits=Limits(given["max_plans"], given["budget_s"]),
            price=given["price"],
            objective=given["objective"],
            max_step_s=given["max_step_s"] or math.inf,
            around=given["around_my_plan"],
            resume=given["resume"],
            quiet=given["quiet"],
            out=folder,
            assume=assumptions_of(given["assume"]),
        )


def run_sweep(request: SweepRequest, say: Callable[[str], None]) -> tuple[SweepResult, bool]:
    """Return the result of the sweep, and whether it was interrupted.

    Raises:
        UserError: no plan works or fits, or the sweep was interrupted before any result.
    """
    setup, entry = request.setup, request.setup.entry
    claim_folder(request.out, setup)
    if setup.note:
        say(f"{entry.name}: {setup.note}")
    try:
        with SweepChild(entry.file, entry.name, request.out / "recordings", request.resume, request.assume) as child:
            try:
                if request.hardware is None:
                    require_ranks(setup)
                facts = facts_of(setup, child)
                if request.hardware is None or request.hardware.host is not None:
                    facts["loss"] = None  # measured plans would compile on this machine's CPUs
                space = setup.space(facts)
                setup.require_meshes(space)
                written = setup.as_written(space) if request.around else None
                state = SweepState(space, written, request.objective, request.max_step_s)
                if request.hardware is None:
                    _measure(request, child, state)
                else:
                    _predict(request, request.hardware, child, state)
                codes = _codes(request, child, state)
                return result_of(setup, state, request.hardware, codes, request.price), state.interrupted
            finally:
                if request.resume and request.hardware is not None:
                    say(f"--reuse took {count_text(child.num_reused, 'recording')} from the earlier sweep")
                for ended in child.again:
                    say(f"a process that records steps was {ended}; distbench started it again")
    except KeyboardInterrupt:
        say(f"too early for a ranking (recordings and measurements are in {request.out}); continue with --reuse")
        raise


def _predict(request: SweepRequest, hardware: Hardware, child: SweepChild, state: SweepState) -> None:
    """Predict plans; with a hardware file of this machine, also measure the best of them."""
    setup = request.setup
    num_cases = 0
    best_shown: Prediction | None = None
    with display_for("sweep", request.quiet) as display:

        def show_progress(num_more: int, num_answered: int) -> None:
            nonlocal num_cases, best_shown
            num_cases += num_more
            if num_more:
                display.event({"event": "plan", "num_cases": num_cases})
                display.event({"event": "case", "id": "sweep/recording steps"})
            for _ in range(num_answered):
                display.event({"event": "done", "id": "", "status": "ok"})
            if (leader := next(iter(state.ranked_predictions), None)) not in (best_shown, None):
                best_shown = leader
                display.event({"event": "note", "text": best_so_far(state, setup.world)})

        try:
            predict(
                state, Predictor(child, setup.base, state.space, hardware, show_progress, setup.float8), request.limits
            )
        except KeyboardInterrupt:
            if not state.predictions:
                raise
            state.interrupted, state.stopped = True, "the sweep was interrupted; continue with --reuse"
    require_fitting(setup, state, hardware)
    if not state.interrupted and is_here(setup, hardware):
        usable = [prediction.candidate for prediction in state.ranked_predictions if prediction.fits]
        best = dict.fromkeys([*([state.written] if state.written else []), *usable])
        _rounds(request, state).run_last([*best][:NUM_FINAL])


def _measure(request: SweepRequest, child: SweepChild, state: SweepState) -> None:
    """Measure the plans that work according to the child process."""
    setup, space, written = request.setup, state.space, state.written
    starting = ([written] if written else space.meshes)[: request.limits.max_plans]
    working, wrong = legal(child, setup, starting)
    if not working:
        if written:
            raise UserError(f"the plan as written does not work: {wrong[written]}")
        state.left_out = wrong
        state.stopped = request.limits.reached if len(starting) < len(space.meshes) else ""
        raise no_plan_error(setup, state, None)

    def changes(best: Sequence[Candidate], most: int) -> list[Candidate]:
        candidates = space.around(written) if written else changes_of_best(space, best)
        changed, wrong_changes = legal(child, setup, candidates[:most])
        wrong.update(wrong_changes)
        return changed

    _rounds(request, state).run(working, changes)
    if not state.measured:
        if state.interrupted:
            raise KeyboardInterrupt
        why = next(iter(state.left_out.values()), "no case was measured")
        raise UserError(f"no plan of {setup.entry.name} could be measured: {why}")
    state.left_out |= wrong


def _rounds(request: SweepRequest, state: SweepState) -> Rounds:
    return Rounds(request.setup, request.limits, state, out=request.out, resume=request.resume, quiet=request.quiet)


def _codes(request: SweepRequest, child: SweepChild, state: SweepState) -> dict[Candidate, PlanCode]:
    """Return the best plan and the changes of the plan as written as code; {} after an interrupt."""
    ranked = [plan.candidate for plan in plans_of(state, request.hardware)]
    changed = [*state.predictions, *state.measured] if state.written else []
    candidates = list(dict.fromkeys([ranked[0], *changed]))
    try:
        if not state.interrupted:
            return code_of(request.setup, child, candidates)
        # The interrupted process must first answer other queries.
        with SweepChild(request.setup.entry.file, request.setup.entry.name) as another:
            return code_of(request.setup, another, candidates)
    except KeyboardInterrupt:
        state.interrupted = True
        return {}


def is_here(setup: Setup, hardware: Hardware) -> bool:
    """Return whether a hardware file describes this machine, and this machine can run that many ranks."""
    from distbench.records.machine import machine_name

    if hardware.host is None or hardware.name != machine_name():
        return False
    try:
        require_ranks(setup)
    except UserError:
        return False
    return True


def require_ranks(setup: Setup) -> None:
    """Raise UserError for plans that this machine cannot run."""
    from distbench.records.machine import accelerator_here, device_count

    device = accelerator_here()[0]
    if "real-size" in setup.entry.tags and device == "cpu":
        name = setup.entry.name
        raise UserError(f"{name} has a model of its real size, too large for CPUs; predict with --hardware h100")
    most = device_count(device) if device != "cpu" else RANKS_PER_CPU * (os.cpu_count() or 1)
    if setup.world > most:
        problem = f"--world {setup.world} is more than the {most} ranks that this machine can measure"
        raise UserError(f"{problem}; predict with --hardware, or give a smaller --world")
