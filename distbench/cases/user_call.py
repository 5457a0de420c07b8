"""A user's function over the mesh: timed unchanged, and checked by the user's check if there is one."""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distbench.ranks.case_protocol import CaseSpec, OpenedCase
from distbench.ranks.context import RankContext
from distbench.records.run_file import Case
from distbench.spec import Scenario, UserError, format_mesh


def scenario_of_call(name: str, function: Callable[..., Any], variant: Mapping[str, Any]) -> Scenario:
    """Return a scenario that times one function."""
    return Scenario(calls={name: partial(function, **variant)})


def call_cases(scenario: Scenario, label: str, context: RankContext) -> Iterator[CaseSpec]:
    """Yield one case per call of the scenario."""
    name, _, axes = label.partition("/")
    mesh = format_mesh(dict(zip(context.mesh_dims, context.mesh_shape, strict=True)))
    for call_name, make in scenario.calls.items():
        case_id = "/".join(part for part in ("call", call_name, axes, mesh) if part)
        params = {"scenario": name, "call": call_name, "variant": axes, "mesh": mesh}
        yield CaseSpec(
            Case(case_id, "call", params), partial(_open, call_name, make, context), group=f"call/{call_name}"
        )


@contextlib.contextmanager
def _open(what: str, make: Callable[[Any], Any], context: RankContext) -> Iterator[OpenedCase]:
    returned = make(context.mesh)
    given = returned if isinstance(returned, tuple) and 2 <= len(returned) <= 3 else (returned, None)
    (call, check), per_rank = given[:2], given[2] if len(given) == 3 else {}
    if not callable(call) or not (check is None or callable(check)) or not isinstance(per_rank, Mapping):
        kind = type(returned).__name__
        if isinstance(returned, tuple):
            kind = "a tuple of " + (", ".join(type(part).__name__ for part in returned) or "nothing")
        raise UserError(
            f"call {what!r}: its function returned {kind}; return the function to time, without arguments, or a tuple "
            "of this function, a check of its result and a dict of this rank's numbers"
        )
    numbers = _of_all_ranks(what, per_rank, context)
    fields = {
        "group_size": context.mesh.size(),
        "mesh_dim": "x".join(context.mesh_dims),
        "counters": {"checked": check is not None, **({"per_rank": numbers} if numbers else {})},
    }
    yield OpenedCase(lambda stamp: call(), partial(_verdict, what, check), fields=fields)


def _of_all_ranks(what: str, own: Mapping[Any, Any], context: RankContext) -> dict[str, list[float]]:
    """Return the numbers of every rank by name. All ranks must call this together, also ranks without numbers."""
    of_ranks: list[dict[str, Any]] = context.gather({str(name): number for name, number in own.items()})
    for rank, of_rank in enumerate(of_ranks):
        if of_rank.keys() != of_ranks[0].keys():
            names = [", ".join(each) or "no number" for each in (of_rank, of_ranks[0])]
            raise UserError(
                f"call {what!r}: its function returned {names[0]} on rank {rank} and {names[1]} on rank 0; return the "
                "same names on every rank"
            )
        for name, number in of_rank.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise UserError(
                    f"call {what!r}: number {name!r} of rank {rank} is {number!r}; return a finite number, 0 or more"
                )
    return {name: [float(of_rank[name]) for of_rank in of_ranks] for name in of_ranks[0]}


def _verdict(what: str, check: Callable[[], object] | None) -> str | None:
    """Return None if this rank's result is correct or not checked; else the problem."""
    if check is None:
        return None
    try:
        outcome = check()
    except AssertionError as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        # For an assert without a message, show its source line.
        message = str(error).strip().partition("\n")[0] or at.line or "an assert"
        return f"{message} (assert at {Path(at.filename).name}:{at.lineno})"
    if outcome is None or outcome is True:
        return None
    if outcome is False:
        return "its check returned False"
    if isinstance(outcome, str):
        return outcome
    raise UserError(
        f"call {what!r}: its check returned {type(outcome).__name__}; return None or True if the result is correct, "
        "False or a sentence if it is wrong, or use assert"
    )
