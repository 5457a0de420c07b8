"""Which tests start processes: told by the fixtures they use, held by a guard, left out by `--fast`. Which take long.

A test that uses the fixture `ranks` (itself, or through another fixture) gets the marker `ranks`, one that uses
`children` gets `child`. While any other test runs, starting a process fails that test with a sentence.

A test marked `long` runs only with `--all`, or if the command names files.
"""

import gc
import multiprocessing.util
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MARKER_OF_FIXTURE = {"ranks": "ranks", "children": "child"}
# Where every way to start a process comes through. multiprocessing's fork uses os.fork, its other ways spawnv_passfds.
STARTS = (
    (subprocess.Popen, "__init__"),
    (os, "fork"),
    (os, "forkpty"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
    (os, "system"),
    (multiprocessing.util, "spawnv_passfds"),
)

# matplotlib lists the fonts when a machine draws its first plot, and keeps the list for later processes.
FONT_LIST = "fc-list"


class Guard:
    """Refuses to start processes while a test runs that is not marked for it."""

    def __init__(self) -> None:
        self.refused: list[str] | None = None
        """What the running test tried to start; None where it may start processes."""

    def refuse(self, what: str) -> None:
        """Fail the running test if it may not start a process.

        What fails it is no Exception, so that code under test which goes on without its child does not hide it; and
        the test fails at its end too.
        """
        if self.refused is not None:
            self.refused.append(what)
            pytest.fail(sentence([what]))

    def guarded(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def start(*arguments: Any, **named: Any) -> Any:
            command = _command(what, arguments, named)
            if not command.startswith(FONT_LIST):
                self.refuse(f"{what} {command}".strip())
            return function(*arguments, **named)

        return start


def _command(what: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    given = named.get("args", arguments[1] if len(arguments) > 1 else "") if what == "subprocess.Popen" else ""
    return " ".join(map(str, given)) if isinstance(given, list | tuple) else str(given)


def sentence(refused: list[str]) -> str:
    return (
        f"this test starts a process ({'; '.join(refused)}) and does not say so: "
        "use the fixture `children`, or `ranks` where ranks are launched (tests/README.md)"
    )


def markers_of(item: pytest.Item) -> list[str]:
    """Of a test, by the fixtures that it uses itself or through others; a marker put on by hand changes nothing."""
    used = getattr(item, "fixturenames", [])
    return [marker for fixture, marker in MARKER_OF_FIXTURE.items() if fixture in used]


def is_left_out(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command's options leave a test out."""
    is_long = item.get_closest_marker("long") is not None
    return (config.getoption("--fast") and bool(markers_of(item))) or (is_long and not config.getoption("--all"))


def longest_first(items: list[pytest.Item]) -> None:
    """Sort whole files as pytest-xdist is to hand them out: those that launch ranks, then those that start children,
    then the fast ones. So no worker is left alone with a long file at the end."""
    order = [*MARKER_OF_FIXTURE.values(), None]
    place_of_file: dict[Path, int] = {}
    for item in items:
        place = min(order.index(marker) for marker in [*markers_of(item), None])
        place_of_file[item.path] = min(place, place_of_file.get(item.path, place))
    items.sort(key=lambda item: place_of_file[item.path])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests that start neither ranks nor child processes")
    parser.addoption("--all", action="store_true", help="also tests marked long; default where files are named")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers(), "tiers")


class Tiers:
    """The pytest plugin of both: markers at collection, the guard while tests run."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.patched = pytest.MonkeyPatch()

    def pytest_configure(self, config: pytest.Config) -> None:
        # pytest-xdist names the files to its processes, but not whether the command named them.
        if hasattr(config, "workerinput"):
            config.option.all = config.workerinput["all"]
        elif config.args_source is config.ArgsSource.ARGS:
            config.option.all = True
        for fixture, marker in MARKER_OF_FIXTURE.items():
            config.addinivalue_line("markers", f"{marker}: put on by the fixture `{fixture}`, never by hand")
        for owner, name in STARTS:
            what = f"{owner.__module__}.{owner.__name__}" if isinstance(owner, type) else f"{owner.__name__}.{name}"
            self.patched.setattr(owner, name, self.guard.guarded(getattr(owner, name), what))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["all"] = node.config.option.all

    def pytest_unconfigure(self) -> None:
        self.patched.undo()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[object]:
        """What is imported by now stays: looking for garbage in it, again and again, is a tenth of the fast tier."""
        gc.disable()
        result = yield
        gc.freeze()
        gc.enable()
        return result

    def pytest_sessionfinish(self) -> None:
        gc.unfreeze()  # else libraries count at the end what nobody gave back

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            for marker in markers_of(item):
                item.add_marker(marker)
        if hasattr(config, "workerinput"):
            longest_first(items)
        left_out = [item for item in items if is_left_out(item, config)]
        items[:] = [item for item in items if not is_left_out(item, config)]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, self.guard.refused = self.guard.refused, None if markers_of(item) else []
        try:
            return (yield)
        finally:
            self.guard.refused = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield
        if self.guard.refused:
            pytest.fail(sentence(self.guard.refused))
