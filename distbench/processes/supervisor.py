"""`python supervisor.py GRACE COMMAND...`: run a command, and end all its remaining processes.

Linux re-parents an orphan to its nearest ancestor that is a child subreaper (prctl(2)). Every process that the command
starts therefore remains a descendant of this process, even a child that forks twice, creates a session, or clears its
environment. After the end of the command, the remaining descendants are killed.

Two supervisors run, and the second is a child of the first. If one supervisor is killed, the other ends the remaining
processes. This file is run by its path and imports few modules, because each launch starts it.
"""

import io
import os
import resource
import signal
import sys
import time

PARENT_PID = "DISTBENCH_PARENT_PID"
GRACE_S, KILL_S, KILL_POLL_S = 5.0, 5.0, 0.001
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOPS: set[int] = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
# Python ignores these signals, and a command must not inherit the ignored state.
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
NOT_STARTED = 2


def main(grace_s: float, command: list[str]) -> None:
    """Run the command, and end with its exit code or signal."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPS, signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    pid = os.fork()
    if not pid:
        os.setsid()  # a signal to the process group of one supervisor does not reach the other
        die_with_parent(signal.SIGTERM)
        adopt_orphans()
        pid = _spawn(command, mask)
    _end_as(_wait(pid, grace_s))


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Request a signal for the end of this process's parent, or end at once if the parent has ended already.

    The environment variable PARENT_PID is the parent's pid before the call, and this process's pid after the call.
    Linux only.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
    # A parent that ended before this request causes no signal.
    if os.getppid() != int(os.environ.get(PARENT_PID, os.getppid())):
        os._exit(1)
    os.environ[PARENT_PID] = str(os.getpid())


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant whose parent ends. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """Kill all descendants, and wait at most KILL_S seconds. The children of a killed process become children of this
    process, and are killed next."""
    deadline_s = time.monotonic() + KILL_S
    while _reaped(0)[1]:
        pids = _children()
        if time.monotonic() > deadline_s:
            print(
                f"distbench: warning: processes {', '.join(map(str, pids))} cannot be killed",
                file=sys.stderr,
                flush=True,
            )
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # the process has ended, or belongs to another user
                continue
        time.sleep(KILL_POLL_S)


def _spawn(command: list[str], mask: set[int | signal.Signals]) -> int:
    try:
        return os.posix_spawnp(
            command[0], command, os.environ, setsid=True, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON
        )
    except OSError as error:
        print(f"OSError: {command[0]} cannot be started: {error.strerror}; see `ulimit -a`", file=sys.stderr)
        sys.exit(NOT_STARTED)


def _wait(pid: int, grace_s: float) -> int:
    """The exit code of a child, negative for a signal. All descendants end before the return."""
    deadline_s, exit_code = None, None
    while exit_code is None:
        left_s = 3600.0 if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            exit_code = -signal.SIGKILL
            break
        signal_info = signal.sigtimedwait({*STOPS, signal.SIGCHLD}, left_s)
        if signal_info and signal_info.si_signo in STOPS:
            os.kill(pid, signal.SIGTERM)
            deadline_s = deadline_s or time.monotonic() + grace_s
        exit_code = _reaped(pid)[0]
    end_descendants()
    return exit_code


def _reaped(pid: int) -> tuple[int | None, bool]:
    """Collect ended children. Return this child's exit code, if the child has ended, and whether children remain."""
    exit_code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_code, False
        if not ended:
            return exit_code, True
        if ended == pid:
            exit_code = os.waitstatus_to_exitcode(status)


def _children() -> list[int]:
    """Pids of this process's children, including ended children that were not collected."""
    pids = []
    for folder in os.scandir("/proc"):
        if not folder.name.isdecimal():
            continue
        try:
            with io.FileIO(f"{folder.path}/stat") as file:
                stat = file.read()
        except OSError:  # the process has ended
            continue
        # proc(5): "pid (name) state ppid ..."; the name may contain any character, also closing brackets.
        if int(stat.rpartition(b")")[2].split()[1]) == os.getpid():
            pids.append(int(folder.name))
    return pids


def _end_as(exit_code: int) -> None:
    if exit_code >= 0:
        sys.exit(exit_code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -exit_code != signal.SIGKILL:
        signal.signal(-exit_code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.kill(os.getpid(), -exit_code)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
