"""Starts fork_server.py: one for a pytest process alone, or one for all processes of pytest-xdist."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "fork_server.py"
READY_S = 120
# Memory that a rank gives back it takes again in its next step, page by page: a tenth of its time.
KEEPS_MEMORY = {"MALLOC_TOP_PAD_": str(1 << 26), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def search_path(root: Path) -> str:
    """PYTHONPATH of a child: the tree under test, then what this process was given, as for another torch."""
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])


class ForkServer:
    """A process that imports torch and then listens at `address`, until it is closed or whoever started it ends."""

    def __init__(self, root: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forks"))  # sockets have short paths only
        self.address = self._folder / "server"
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(self.address)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **KEEPS_MEMORY, "PYTHONPATH": search_path(root)},
        )

    def close(self) -> None:
        """End it and with it whatever it forked."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def wait_for(address: Path) -> None:
    """Return when a server listens there."""
    deadline = time.monotonic() + READY_S
    while not address.exists():
        assert time.monotonic() < deadline, f"the server at {address} did not start within {READY_S} s"
        time.sleep(0.02)


class SharedServer:
    """A pytest plugin: with pytest-xdist its processes share one server, which imports torch while they do."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._server: ForkServer | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if node.config.getoption("--fast"):
            return
        self._server = self._server or ForkServer(self._root)
        node.workerinput["fork_server"] = str(self._server.address)

    def pytest_unconfigure(self) -> None:
        if self._server is not None:
            self._server.close()
