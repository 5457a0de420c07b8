"""What a command leaves behind, however it leaves it and however it ends, ends with its supervisor."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distbench.processes import start_supervised, stop_supervised
from processes import Children

# Each way has a function that ends where `here` is called: in the process that stays. All inherit a pipe.
WAYS = """
import os, signal, subprocess, sys, time
PIPE, ENDING, READY = 9, sys.argv[2], sys.argv[3]  # some shells take one digit
os.dup2(int(sys.argv[1]), PIPE)

def here(seconds=300):
    os.write(PIPE, b".")
    time.sleep(seconds)
    os._exit(0)

def forked(then=here, *given):
    if os.fork() == 0:
        then(*given)

def executed(**options):
    subprocess.Popen(["sh", "-c", f"printf . >&{PIPE}; exec sleep 300"], pass_fds=[PIPE], **options)

def daemon(then=here):
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.closerange(0, 3)
    os.environ.clear()
    then()

def without_environment():
    daemon(lambda: os.execve("/bin/sh", ["sh", "-c", f"printf . >&{PIPE}; sleep 300"], {}))

def deaf():
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    here()

def stopped():
    os.write(PIPE, b".")
    os.kill(os.getpid(), signal.SIGSTOP)
    here()

def nested():
    daemon(lambda: daemon(lambda: daemon()))

def restarting():
    os.setsid()
    os.write(PIPE, b".")
    while True:
        child = os.fork()
        if not child:
            time.sleep(300)
        os.waitpid(child, 0)

def moving():
    os.write(PIPE, b".")
    while not os.fork() or os._exit(0):
        time.sleep(0.02)

for way in (here, daemon, without_environment, deaf, stopped, nested, restarting, moving):
    forked(way)
executed()
executed(start_new_session=True)
while not os.path.exists(READY):
    time.sleep(0.01)
if ENDING == "raises":
    raise ValueError
if ENDING == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if ENDING != "ends":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)
"""
NUM_WAYS = 10
PARENT = """
import sys
from distbench.processes import start_supervised
child = start_supervised([sys.executable, "-IS", *sys.argv[2:]], grace_s=0.2, pass_fds=[int(sys.argv[4])])
print(child.pid, flush=True)
sys.exit(child.wait() % 256)
"""


@contextmanager
def left_by(children: Children, folder: Path, ending: str) -> Iterator[tuple["subprocess.Popen[str]", int, int]]:
    """A process that started a command, which has left processes in all ways and then ends: that process, the pid of
    the supervisor, and a pipe that is at its end when none of them is there."""
    ours, theirs = os.pipe()
    words = ("-", "-c", WAYS, theirs, ending, folder / "ready")
    command = (sys.executable, "-c", PARENT, *map(str, words))
    with open(ours, "rb"), children.start(*command, pass_fds=[theirs], stdout=subprocess.PIPE) as parent:
        os.close(theirs)
        try:
            assert parent.stdout is not None
            supervisor = int(parent.stdout.readline())
            seen = b""
            while len(seen) < NUM_WAYS:
                assert select.select([ours], [], [], 30)[0], f"{len(seen)} of {NUM_WAYS} are there"
                seen += os.read(ours, NUM_WAYS)
            (folder / "ready").touch()
            yield parent, supervisor, ours
        finally:
            parent.kill()


def children_of(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def is_at_its_end(pipe: int, wait_s: float = 20.0) -> bool:
    return bool(select.select([pipe], [], [], wait_s)[0]) and os.read(pipe, 1) == b""


@pytest.mark.parametrize(("ending", "code"), [("ends", 0), ("raises", 1), ("is killed", -signal.SIGKILL % 256)])
def test_no_process_of_a_command_that_ends_is_left(children: Children, tmp_path: Path, ending: str, code: int) -> None:
    with left_by(children, tmp_path, ending) as (parent, _, pipe):
        assert parent.wait(20) == code
        # Not a moment later: when the supervisor has ended, nothing is there.
        assert is_at_its_end(pipe, 0.0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whom", ["supervisor", "inner", "parent"])
def test_no_process_of_a_command_that_is_ended_is_left(
    children: Children, tmp_path: Path, whom: str, signum: signal.Signals
) -> None:
    with left_by(children, tmp_path, "waits") as (parent, supervisor, pipe):
        (inner,) = children_of(supervisor)
        os.kill({"supervisor": supervisor, "inner": inner, "parent": parent.pid}[whom], signum)
        if signum == signal.SIGSTOP:
            os.kill(parent.pid, signal.SIGKILL)
        if (whom, signum) == ("supervisor", signal.SIGSTOP):
            os.kill(supervisor, signal.SIGCONT)
        assert is_at_its_end(pipe)


def test_a_launcher_of_nodes_ends_with_the_command_that_is_killed(children: Children, tmp_path: Path) -> None:
    code = "from distbench.launch.nodes import run_here; run_here(['sh', '-c', 'echo $$; exec sleep 300'])"
    with children.start(sys.executable, "-c", code, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        launcher = os.pidfd_open(int(command.stdout.readline()))
        command.kill()
        assert select.select([launcher], [], [], 20)[0]  # readable when it has ended
        os.close(launcher)


def test_children_of_the_process_that_starts_it_are_left_alone(children: Children) -> None:
    own = children.start("sleep", "60", start_new_session=True)
    supervisor = start_supervised(["sh", "-c", "sleep 300 & sleep 300"])
    stop_supervised(supervisor)
    assert supervisor.returncode == -signal.SIGTERM and own.poll() is None
    own.kill()
    own.wait()
