"""Forks a process that has torch imported for whoever starts a Python whose start is not what is tested.

`python fork_server.py ADDRESS` imports what ranks and child processes need and listens at a Unix socket. Each client
(forked_python.py, which stands in for `sys.executable`) gets two processes: one that holds the connection, and its
child that does as `python ARGUMENTS` would. Importing torch takes seconds, a fork some milliseconds.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from distbench.processes.supervisor import PARENT_PID, die_with_parent

IMPORTED = (
    "distbench.cli.main",
    "distbench.worker.rank_session",
    "matplotlib.figure",
    "pandas",
    # What the first step of a rank imports: an optimizer's, a checkpoint's or a hook's own module.
    "torch._dynamo",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
    "torch.distributed._tools",
    "torch.distributed.tensor.experimental._attention",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
)


def serve(address: str) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    # What is imported stays: a rank collects garbage before every step that it measures, 0.1 s each in these objects.
    gc.freeze()
    # Whoever has ended is nobody's to wait for: each client learns from its own connection how its process did.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)  # what is there answers
        while True:
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                die_with_parent()
                answer(connection)
            connection.close()


def answer(connection: socket.socket) -> NoReturn:
    """One client's connection, from its request until its process has ended, or it has gone itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("r", encoding="utf-8", errors="surrogateescape") as stream:
        request = json.loads(stream.readline())
    pid = os.fork()
    if not pid:
        connection.close()
        become(request, streams)
    for stream_fd in streams:
        os.close(stream_fd)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended in ready:
        _, status = os.waitpid(pid, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    else:
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def become(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be the process that the client asks for: its streams, folder, environment and program."""
    os.setsid()
    die_with_parent()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if PARENT_PID in os.environ:
        # Whoever started the client; here the one that holds the connection is in its place.
        os.environ[PARENT_PID] = str(os.getppid())
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and path not in sys.path]
    # What it starts with `sys.executable` is forked too.
    sys.executable = request["executable"]
    os.posix_spawnp = functools.partial(spawn, os.posix_spawnp)  # type: ignore[assignment]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    end_as(request["arguments"])


def end_as(arguments: list[str]) -> NoReturn:
    """Run as `python ARGUMENTS`, and end this process."""
    exit_code = run(arguments)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def spawn(real: Any, path: str, words: list[str], environment: Any, **options: Any) -> int:
    """`os.posix_spawnp`: a supervisor forks what it starts with the stand-in, so that this is below it."""
    if path != sys.executable:
        return int(real(path, words, environment, **options))
    if pid := os.fork():
        return pid
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, options["setsigmask"])
    end_as(words[1:])


def run(arguments: list[str]) -> int:
    """As `python ARGUMENTS` does: its exit code."""
    how, *rest = arguments
    try:
        if how == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif how in ("-m", "-mu"):
            sys.argv = rest
            sys.path.insert(0, os.getcwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how in ("-u", "-IS"):
            return run(rest)
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(how)))
            runpy.run_path(how, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, int) or left.code is None:
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    serve(sys.argv[1])
