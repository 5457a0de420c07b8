"""`pytest --distbench`: a fixture that times a function on several gloo ranks, through the line every run takes.

Every pytest run of an environment with distbench in it loads this module, so it imports nothing until a test asks.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from distbench.pytest_plugin.fixture import Distbench, MeasuredCase

FIXTURE = "distbench"
MARKER = (
    "distbench(ranks=2, mesh=None, timeout_s=300, quick=False): how the distbench fixture launches: so many gloo "
    "ranks, or a mesh such as {'tp': 2}; given up after timeout_s seconds without progress; quick takes few samples."
)
SKIPPED = "launches gloo ranks and times them; give --distbench to run it"
# Cases whose rows no other plugin shows.
UNSHOWN = pytest.StashKey[list["MeasuredCase"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's two options."""
    group = parser.getgroup("distbench")
    group.addoption("--distbench", action="store_true", help="Run the tests that use the distbench fixture.")
    group.addoption(
        "--distbench-out",
        metavar="DIR",
        help="Keep run files and ranks' logs in DIR, for `distbench report` and `distbench gate`. "
        "Default: pytest's temporary folder.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", MARKER)
    config.stash[UNSHOWN] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test that uses the fixture, so that -m finds it; without --distbench, skip it before any fixture."""
    for item in items:
        if FIXTURE in getattr(item, "fixturenames", ()):
            if item.get_closest_marker(FIXTURE) is None:
                item.add_marker(FIXTURE)
            if not config.getoption("distbench"):
                item.add_marker(pytest.mark.skip(reason=SKIPPED))


@pytest.fixture(name=FIXTURE)
def distbench_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Distbench":
    """`distbench(function, *args)`: the measured cases of `function(mesh, *args)`, called on every rank."""
    from distbench.pytest_plugin.fixture import Distbench

    out_option = request.config.getoption("distbench_out")
    out = request.config.invocation_params.dir / out_option if out_option else tmp_path_factory.getbasetemp() / FIXTURE
    return Distbench(request.node, Path(out), request.config.stash[UNSHOWN])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line a case, where pytest-benchmark has no table of them."""
    lines = [case.line() for case in config.stash.get(UNSHOWN, [])]
    if lines:
        terminalreporter.section("distbench")
        for line in lines:
            terminalreporter.write_line(line)
