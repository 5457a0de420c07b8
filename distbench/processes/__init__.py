"""Commands below a supervisor, which leaves no process running; and child processes that import torch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distbench.processes.supervisor import GRACE_S, KILL_S, PARENT_PID
from distbench.spec.errors import UserError
from distbench.spec.printable_text import printable

MARGIN_S = 2.0
CHILD = "distbench.worker.child"
MAX_WORDS = 300  # characters


def start_supervised(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, grace_s: float = GRACE_S, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a command below a supervisor, in a session of its own; the process returned is the supervisor.

    The supervisor ends after the command has ended and every remaining process of the command has been killed. It ends
    with the command's exit code or by the command's signal. SIGTERM to the supervisor, or any end of this process, has
    the same effect. Outside of Linux the command runs without a supervisor.

    Args:
        command: the program and its arguments.
        environment: of the command; this process's by default.
        grace_s: seconds from SIGTERM until remaining processes are killed.
        options: of `subprocess.Popen`.

    Raises:
        OSError: the machine's limit on processes is reached.
        ValueError: an argument or a variable that the system does not accept.
    """
    supervisor = [sys.executable, "-IS", str(Path(__file__).with_name("supervisor.py")), str(grace_s)]
    variables = {**(os.environ if environment is None else environment), PARENT_PID: str(os.getpid())}
    words = [*(supervisor if sys.platform == "linux" else []), *command]
    return subprocess.Popen(words, env=variables, start_new_session=True, **options)


def stop_supervised(process: "subprocess.Popen[bytes]", grace_s: float = GRACE_S) -> None:
    """End a process of `start_supervised` if it still runs, and wait for it; `grace_s` as in `start_supervised`."""
    if process.poll() is not None:
        return
    process.terminate()
    process.send_signal(signal.SIGCONT)  # a user may have stopped it
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s + KILL_S + MARGIN_S)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits for a device or a server's disk cannot be killed before the device responds.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)


def ended_text(code: int, complaints: Sequence[str]) -> str:
    """Return `ended by SIGABRT (its last words: ...)`, of a process that a signal ended.

    Args:
        code: its exit code, negative, as in `subprocess` and `multiprocessing`.
        complaints: lines of its standard error.
    """
    words = last_words(complaints)
    # Most real-time signals have no name.
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"ended by {name}" + (f" (its last words: {words})" if words else "")


def last_words(complaints: Sequence[str]) -> str:
    """Return the last line that is not blank, shortened if it is long; empty without one."""
    lines = [line.strip() for line in complaints if line.strip()]
    return lines[-1][:MAX_WORDS] if lines else ""


def ask_child(
    verb: str, arguments: Sequence[str] = (), *, given: Any = None, timeout_s: float, failure: str = "{why}"
) -> Any:
    """Return the answer of `python -m distbench.worker.child VERB ARGUMENTS`: its last line, read from JSON.

    A child ended by a signal is started a second time: about one recording in 120 was aborted, never twice in a row.

    Args:
        given: plain data that the child reads as JSON from its standard input; None for an empty one.
        timeout_s: seconds after which the child is ended.
        failure: the message without an answer; `{why}` in it is replaced by the reason.

    Raises:
        UserError: the child failed, did not end in time, printed no JSON, or printed {"user_error": sentence}.
    """
    command = [sys.executable, "-m", CHILD, verb, *arguments]
    question = b"" if given is None else json.dumps(given).encode()
    code, lines, complaints = _answer_of(command, question, timeout_s, failure)
    if is_again := code < 0:
        sentence = f"distbench: a child process was {ended_text(code, complaints)}; distbench starts it again"
        print(printable(sentence), file=sys.stderr)
        code, lines, complaints = _answer_of(command, question, timeout_s, failure)
    try:
        if code:
            raise ValueError("a failed child has no result")
        answer = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        why = f"it was {ended_text(code, complaints)}" if code < 0 else last_words(complaints) if code else ""
        why = (why or "it printed no answer") + (", second attempt" if is_again else "")
        raise UserError(failure.replace("{why}", why)) from error
    if isinstance(answer, dict) and "user_error" in answer:
        raise UserError(answer["user_error"])
    return answer


def _answer_of(
    command: Sequence[str], question: bytes, timeout_s: float, failure: str
) -> tuple[int, list[str], list[str]]:
    """The exit code of a child, the lines that it printed, and those of its standard error."""
    pipe = subprocess.PIPE
    with start_supervised(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        try:
            outputs = child.communicate(question, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UserError(failure.replace("{why}", f"it did not end within {timeout_s:g} s")) from error
        finally:
            stop_supervised(child)
    lines, complaints = (text.decode("utf-8", "replace").splitlines() for text in outputs)
    return child.returncode, lines, complaints
