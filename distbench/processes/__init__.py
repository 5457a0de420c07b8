"""Commands under a supervisor that ends all their processes, and child processes that import torch."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.processes.supervisor import GRACE_S, KILL_S, PARENT_PID
from distbench.spec.errors import UserError
from distbench.spec.printable_text import printable

if TYPE_CHECKING:
    import subprocess

MARGIN_S = 2.0
CHILD = "distbench.worker.child"
MAX_WORDS = 300  # characters


def start_supervised(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, grace_s: float = GRACE_S, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a command under a supervisor in a new session, and return the supervisor's process.

    The supervisor ends after the command has ended and every remaining process of the command has been killed. The
    supervisor ends with the command's exit code or signal. SIGTERM to the supervisor, or any end of this process, has
    the same effect. Outside of Linux the command runs without a supervisor.

    Args:
        command: the program and its arguments.
        environment: environment of the command. The default is the environment of this process.
        grace_s: seconds from SIGTERM until remaining processes are killed.
        options: options of `subprocess.Popen`.

    Raises:
        OSError: the machine's limit on processes is reached.
        ValueError: the system does not accept an argument or a variable.
    """
    import subprocess

    supervisor = [sys.executable, "-IS", str(Path(__file__).with_name("supervisor.py")), str(grace_s)]
    variables = {**(os.environ if environment is None else environment), PARENT_PID: str(os.getpid())}
    words = [*(supervisor if sys.platform == "linux" else []), *command]
    return subprocess.Popen(words, env=variables, start_new_session=True, **options)


def stop_supervised(process: "subprocess.Popen[bytes]", grace_s: float = GRACE_S) -> None:
    """End a process of `start_supervised`, and wait for its end. `grace_s` is as in `start_supervised`."""
    if process.poll() is not None:
        return
    import subprocess

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
    """Return a text such as `ended by SIGABRT (its last words: ...)` for a process that a signal ended.

    Args:
        code: negative exit code of the process, as in `subprocess` and `multiprocessing`.
        complaints: lines of the process's standard error.
    """
    words = last_words(complaints)
    # Most real-time signals have no name.
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"ended by {name}" + (f" (its last words: {words})" if words else "")


def last_words(complaints: Sequence[str]) -> str:
    """Return the last line that is not blank, cut at MAX_WORDS, or an empty text."""
    lines = [line.strip() for line in complaints if line.strip()]
    return lines[-1][:MAX_WORDS] if lines else ""


def ask_child(
    verb: str, arguments: Sequence[str] = (), *, given: Any = None, timeout_s: float, failure: str = "{why}"
) -> Any:
    """Return the answer of `python -m distbench.worker.child VERB ARGUMENTS`, which is the last line as JSON.

    A child that a signal ended is started a second time. About one recording in 120 was aborted, never two in a row.

    Args:
        given: plain data that the child reads as JSON from standard input, or None for an empty input.
        timeout_s: seconds after which the child is ended.
        failure: the error message. `{why}` is replaced by the reason.

    Raises:
        UserError: the child failed, exceeded the time limit, printed no JSON, or printed {"user_error": sentence}.
    """
    command = [sys.executable, "-m", CHILD, verb, *arguments]
    question = b"" if given is None else json.dumps(given).encode()
    code, lines, complaints = _answer_of(command, question, timeout_s, failure)
    if is_again := code < 0:
        sentence = (
            f"distbench: warning: a child process was {ended_text(code, complaints)}. distbench starts the "
            "process again"
        )
        print(printable(sentence), file=sys.stderr)
        code, lines, complaints = _answer_of(command, question, timeout_s, failure)
    try:
        if code:
            raise ValueError("a failed child has no result")
        answer = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        if code < 0:
            why = f"the child process was {ended_text(code, complaints)}"
        else:
            why = last_words(complaints) if code else ""
        why = (why or "the child process printed no answer") + (", second attempt" if is_again else "")
        raise UserError(failure.replace("{why}", why)) from error
    if isinstance(answer, dict) and "user_error" in answer:
        raise UserError(answer["user_error"])
    return answer


def _answer_of(
    command: Sequence[str], question: bytes, timeout_s: float, failure: str
) -> tuple[int, list[str], list[str]]:
    """The exit code of a child, and the lines of its standard output and standard error."""
    import subprocess

    pipe = subprocess.PIPE
    with start_supervised(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        try:
            outputs = child.communicate(question, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UserError(failure.replace("{why}", f"no answer within {timeout_s:g} s")) from error
        finally:
            stop_supervised(child)
    lines, complaints = (text.decode("utf-8", "replace").splitlines() for text in outputs)
    return child.returncode, lines, complaints
