"""What a test may ask of the pytest plugin: the marker, functions that ranks can find, arguments that can travel."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from distbench.pytest_plugin.fixture import CaseRequest, arguments_of, case_request, entry_of
from distbench.spec import UserError


def bench(mesh: Any, numel: int = 4, *, op: str = "sum", shape: Any = None) -> Any:
    """Nothing to time.

    Never called: what would launch its ranks is replaced.
    """


class Methods:
    def bench(self, mesh: Any) -> Any: ...


def no_mesh() -> Any: ...


def nameless(mesh: Any, *sizes: int) -> Any: ...


def others(mesh: Any, **rest: int) -> Any: ...


def test_the_marker_gives_ranks_or_a_mesh() -> None:
    assert case_request((), {}) == CaseRequest({"dp_shard": 2}, 300.0, False)
    assert case_request((), {"ranks": 4}).mesh == {"dp_shard": 4}
    assert case_request((), {"mesh": {"dp_shard": 2, "tp": 2}, "ranks": 4}).mesh == {"dp_shard": 2, "tp": 2}
    assert case_request((), {"timeout_s": 5, "quick": True}) == CaseRequest({"dp_shard": 2}, 5.0, True)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((4,), {}, "by name only; write ranks=4"),
        ((), {"rank": 4}, "has no argument 'rank' .*ranks"),
        ((), {"ranks": 0}, "ranks=0.*1 or more"),
        ((), {"ranks": "4"}, "ranks='4'.*whole number"),
        ((), {"ranks": 2, "mesh": {"tp": 4}}, "tp=4 has 4 ranks; leave ranks out"),
        ((), {"mesh": "tp=2"}, "give mesh dims and their sizes"),
        ((), {"mesh": {"row": 2}}, "mesh dim 'row' is unknown; use pp, "),
        ((), {"timeout_s": 0}, "a positive number of seconds"),
    ],
)
def test_a_marker_that_cannot_be_is_told_in_one_sentence(args: Any, kwargs: Any, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as message:
        case_request(args, kwargs)
    assert "\n" not in str(message.value)


def test_arguments_get_their_names_from_the_function() -> None:
    assert arguments_of(bench, (8,), {"op": "max"}) == {"numel": 8, "op": "max"}
    assert arguments_of(others, (), {"a": 1, "b": 2}) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda mesh: None, "<lambda>"),
        (Methods().bench, "Methods.bench"),
        (functools.partial(bench, numel=3), "functools.partial"),
        (3, "3 cannot be imported by ranks"),
    ],
)
def test_a_function_that_ranks_could_not_find_is_refused(function: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"{re.escape(message)}.*from the top level of a file"):
        arguments_of(function, (), {})

    def closure(mesh: Any) -> Any:
        return message

    with pytest.raises(UserError, match=r"<locals>\.closure cannot be imported by ranks in other processes"):
        entry_of(closure, {}, {"tp": 2})


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (no_mesh, (), r"no_mesh has no parameter for the mesh; write def no_mesh\(mesh"),
        (nameless, (3,), "nameless has parameters without a name"),
        (bench, (1, 2), "bench cannot be called with these arguments: too many positional arguments"),
    ],
)
def test_arguments_that_do_not_fit_are_told_in_one_sentence(function: Any, args: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        arguments_of(function, args, {})


@pytest.mark.parametrize("value", [object(), {1: 2}, [Path()], float("nan"), {"a": {3}}])
def test_an_argument_that_cannot_travel_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"bench: argument 'shape' is a \w+, which cannot be sent to ranks"):
        entry_of(bench, {"shape": (value,)}, {"tp": 2})
    assert entry_of(bench, {"shape": ((4, 4), None)}, {"tp": 2}).axes == {"shape": ((4, 4), None)}
