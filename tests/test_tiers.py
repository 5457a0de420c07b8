"""The tiers themselves: markers come from fixtures, and a test that is not marked cannot start a process."""

from pathlib import Path

import pytest
from processes import Children

pytest_plugins = ("pytester",)
CONFTEST = """
import pytest
from tiers import pytest_addoption, pytest_configure

@pytest.fixture(scope="session")
def children(): ...

@pytest.fixture(scope="session")
def ranks(): ...

@pytest.fixture(scope="module")
def launched(ranks): ...
"""
OPTIONS = ("-p", "no:cacheprovider", "--strict-markers", "-W", "error")
STARTS = {
    "subprocess.run": "import subprocess; subprocess.run(['true'])",
    "os.fork": "import os; os.fork() or os._exit(0)",
    "os.system": "import os; os.system('true')",
    "os.posix_spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "multiprocessing fork": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "multiprocessing spawn": "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()",
    "swallowed": "import subprocess\n    try: subprocess.run(['true'])\n    except BaseException: pass",
}


@pytest.fixture(autouse=True)
def plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plugins that are installed: pytest-benchmark starts git."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def outcome(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(source)
    return pytester.runpytest_inprocess(*OPTIONS, *options)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.long
def test_a_test_that_is_not_marked_starts_no_process_in_any_way(pytester: pytest.Pytester, start: str) -> None:
    result = outcome(pytester, f"def test_it():\n    {start}\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*this test starts a process (*) and does not say so: use the fixture `children`*"])


def test_nor_does_its_fixture_or_one_that_it_takes_when_it_runs(pytester: pytest.Pytester) -> None:
    source = """
    import subprocess
    import pytest

    @pytest.fixture(scope="module")
    def made():
        subprocess.run(["true"])

    def test_by_fixture(made): ...

    def test_late(request):
        request.getfixturevalue("children")
        subprocess.run(["true"])

    @pytest.mark.ranks
    def test_by_hand():
        subprocess.run(["true"])
    """
    outcome(pytester, source).assert_outcomes(errors=1, failed=2)


STARTING = """
import subprocess
import pytest

@pytest.fixture
def through(launched): ...

def test_child(children): subprocess.run(["true"])
def test_ranks(ranks): subprocess.run(["true"])
def test_through(through): subprocess.run(["true"])

class TestPlain:
    def test_it(self): ...
"""


def test_what_starts_processes_is_marked_by_its_fixtures_and_left_out_by_fast(
    children: Children, pytester: pytest.Pytester
) -> None:
    outcome(pytester, STARTING).assert_outcomes(passed=4)
    for options, passed in ((("--fast",), 1), (("-m", "ranks"), 2), (("-m", "child"), 1)):
        outcome(pytester, STARTING, *options).assert_outcomes(passed=passed, deselected=4 - passed)


def test_long_tests_run_with_all_or_if_their_file_is_named(children: Children, pytester: pytest.Pytester) -> None:
    code = "import pytest\n\ndef test_short(): ...\n\n@pytest.mark.long\ndef test_long(): ..."
    outcome(pytester, code).assert_outcomes(passed=1, deselected=1)
    (file,) = map(str, pytester.path.glob("test_*.py"))
    for option in ("--all", file):
        outcome(pytester, code, option).assert_outcomes(passed=2)
    in_processes = (*OPTIONS, "-o", "markers=long", "-p", "xdist.plugin", "--numprocesses", "1", file)
    pytester.runpytest_subprocess(*in_processes).assert_outcomes(passed=2)
