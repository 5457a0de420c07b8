import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import tiers
from processes import Children, Ranks, SharedServer
from tiers import pytest_addoption  # noqa: F401 (a hook of this conftest too)

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
# Marker to the accelerators that its tests need.
NEEDED = {"gpu": 1, "multi_gpu": 2}
Cli = Callable[..., CompletedProcess[str]]


def pytest_configure(config: pytest.Config) -> None:
    tiers.pytest_configure(config)
    config.pluginmanager.register(SharedServer(ROOT), "fork server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there are too few accelerators, tests that need them are skipped with the reason."""
    if "torch" in sys.modules:
        # Several pytest processes share the CPUs: torch's threads would wait for one another, spinning.
        sys.modules["torch"].set_num_threads(1)
    needing = {item: count for item in items for name, count in NEEDED.items() if item.get_closest_marker(name)}
    devices = num_accelerators() if needing else 0
    for item, count in needing.items():
        if devices < count:
            what = "no accelerator that torch can use here" if not devices else f"{devices} accelerator, {count} needed"
            item.add_marker(pytest.mark.skip(reason=what))


def num_accelerators() -> int:
    if not importlib.util.find_spec("torch"):
        return 0
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


@pytest.fixture(scope="session")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """For the two fixtures below alone: a test that uses it without them may not start anything."""
    shared = getattr(request.config, "workerinput", {}).get("fork_server")
    started = Ranks(ROOT, tmp_path_factory.mktemp("forks"), shared and Path(shared))
    yield started
    started.close()


@pytest.fixture(scope="session")
def children(processes: Ranks) -> Children:
    """Starts child processes; marks the test `child`."""
    return processes


@pytest.fixture(scope="session")
def ranks(processes: Ranks) -> Ranks:
    """Launches ranks, and starts child processes; marks the test `ranks`."""
    return processes


@pytest.fixture(scope="session")
def cli(children: Children) -> Cli:
    """`distbench ARGUMENTS` as a process of its own."""
    return children.cli


@pytest.fixture
def forked_children(children: Children) -> Iterator[None]:
    """Whatever the test starts with `sys.executable` is forked from a process that has torch imported."""
    with children.forked():
        yield


@pytest.fixture(scope="session")
def torchrun_options(children: Children) -> set[str]:
    """torchrun's own options."""
    done = children.run(children.forked_python, "-m", "torch.distributed.run", "--help")
    return set(re.findall(r"--[a-z][a-z-]+", done.stdout))


@pytest.fixture
def known_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs tell of one known host: looking at the real one starts git, uname and nvidia-smi."""
    facts = {"machine": "known", "platform": "Linux", "cpu_model": "x86_64", "num_cpus": 2, "variables": {}}
    monkeypatch.setattr("distbench.launch.job_request.host_facts", lambda: dict(facts))
    monkeypatch.setattr("distbench.launch.job_request.accelerator_here", lambda: ("cpu", 0))
    monkeypatch.setattr("distbench.launch.job_request.device_count", lambda device: 0)


def run_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.jsonl") if path.name != "progress.jsonl")
