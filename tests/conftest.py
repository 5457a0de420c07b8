import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from distbench.cli import main

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
Cli = Callable[..., subprocess.CompletedProcess[str]]


def run_cli(
    *arguments: str, timeout: float = 120, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if name not in variables:
            environment.pop(name, None)
    command = [sys.executable, "-m", "distbench", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Have `launch` fork its ranks out of one process instead of asking torchrun: see ranks/forking.py."""

    def command(num_ranks: int, arguments: list[str], log_dir: str) -> list[str]:
        return [sys.executable, str(ROOT / "tests" / "ranks" / "forking.py"), str(num_ranks), *arguments]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("distbench.launch.attempt.torchrun_command", command)
        patched.setenv("PYTHONPATH", str(ROOT))
        yield


def run_forked(*arguments: str, cwd: Path = ROOT) -> Result:
    """`distbench ARGUMENTS` in this process, its ranks forked."""
    with forked_ranks(), pytest.MonkeyPatch.context() as patched:
        patched.chdir(cwd)
        return CliRunner().invoke(main, arguments)


@pytest.fixture(scope="session")
def cli() -> Cli:
    return run_cli


def run_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.jsonl") if path.name != "progress.jsonl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        import torch

        missing = None if torch.cuda.is_available() else "no CUDA device on this machine"
    except ImportError as error:
        missing = f"torch cannot be imported: {error}"
    if missing:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=missing))
