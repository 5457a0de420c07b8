"""Two fixtures: `distbench` times a function on several gloo ranks (`pytest --distbench`), and
`distbench_communication` records collectives.

Every pytest run in an environment with distbench loads this module, so imports are inside functions.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from distbench.communication_assertions import SeenCommunication
    from distbench.pytest_plugin.fixture import Distbench, MeasuredCase

FIXTURE = "distbench"
MARKER = (
    "distbench(ranks=2, mesh=None, timeout_s=300, quick=False): launch settings of the distbench fixture. ranks: the "
    "number of gloo ranks; mesh: such as {'tp': 2}; timeout_s: seconds without progress until failure; quick: few "
    "samples."
)
SKIPPED = "times gloo ranks; give --distbench to run this test"
# Cases that no other plugin prints.
UNSHOWN = pytest.StashKey[list["MeasuredCase"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("distbench")
    group.addoption("--distbench", action="store_true", help="Run the tests that use the distbench fixture.")
    group.addoption(
        "--distbench-out",
        metavar="DIR",
        help="Keep run files and ranks' logs in DIR, for `distbench report` and `distbench gate`. "
        "Default: pytest's temporary folder.",
    )
    group.addoption(
        "--distbench-update",
        action="store_true",
        help="Write FILE in seen.matches(FILE) of the distbench_communication fixture, instead of comparing.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `distbench`."""
    config.addinivalue_line("markers", MARKER)
    config.stash[UNSHOWN] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test that uses the fixture, for -m. Without --distbench, skip these tests before their fixtures
    run."""
    for item in items:
        if FIXTURE in getattr(item, "fixturenames", ()):
            if item.get_closest_marker(FIXTURE) is None:
                item.add_marker(FIXTURE)
            if not config.getoption("distbench"):
                item.add_marker(pytest.mark.skip(reason=SKIPPED))


@pytest.fixture(name=FIXTURE)
def distbench_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Distbench":
    """`distbench(function, *args)`: call `function(mesh, *args)` on every rank, and return the measured cases."""
    from distbench.pytest_plugin.fixture import Distbench

    out_option = request.config.getoption("distbench_out")
    out = request.config.invocation_params.dir / out_option if out_option else tmp_path_factory.getbasetemp() / FIXTURE
    return Distbench(request.node, Path(out), request.config.stash[UNSHOWN])


@pytest.fixture
def distbench_communication(
    request: pytest.FixtureRequest,
) -> "Callable[..., AbstractContextManager[SeenCommunication]]":
    """`with distbench_communication(model) as seen:` records as `distbench.communication` does; files are next to the
    test file."""
    from functools import partial

    from distbench.communication_assertions import communication

    return partial(communication, folder=request.path.parent, update=request.config.getoption("distbench_update"))


def pytest_assertrepr_compare(op: str, left: Any, right: Any) -> list[str] | None:
    """Print the counted collectives when `seen.count(...) == 1` or `seen.bytes(...) <= ...` fails."""
    if type(left).__module__ != "distbench.communication_assertions":
        return None
    first, *paths = left.explanation()
    return [f"{first}, expected {op} {right!r}", *paths]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print one line per case that is not in pytest-benchmark's table."""
    lines = [case.line() for case in config.stash.get(UNSHOWN, [])]
    if lines:
        terminalreporter.section("distbench")
        for line in lines:
            terminalreporter.write_line(line)
