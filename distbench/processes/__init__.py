"""Commands that run below a supervisor, so that no process of theirs is left; and questions to a child with torch."""

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

    That process ends when the command has ended and every process that the command left has been killed, with the
    command's exit code or by its signal. The same happens when it gets SIGTERM, or when this process ends, however it
    ends. Outside of Linux the command runs without a supervisor.

    Args:
        command: its words.
        environment: of the command; this process's by default.
        grace_s: seconds from SIGTERM until what still runs is killed.
        options: of `subprocess.Popen`.

    Raises:
        OSError: this machine starts no more processes.
        ValueError: a word or a variable that no process can be given.
    """
    supervisor = [sys.executable, "-IS", str(Path(__file__).with_name("supervisor.py")), str(grace_s)]
    variables = {**(os.environ if environment is None else environment), PARENT_PID: str(os.getpid())}
    words = [*(supervisor if sys.platform == "linux" else []), *command]
    return subprocess.Popen(words, env=variables, start_new_session=True, **options)


def stop_supervised(process: "subprocess.Popen[bytes]", grace_s: float = GRACE_S) -> None:
    """End a process of `start_supervised`, if it still runs, and wait for it; `grace_s` as there."""
    if process.poll() is not None:
        return
    process.terminate()
    process.send_signal(signal.SIGCONT)  # somebody may have stopped it
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s + KILL_S + MARGIN_S)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits for a device or a server's disk is not killed before that answers.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)


def ended_text(code: int, complaints: Sequence[str]) -> str:
    """Return `ended by SIGABRT (its last words: ...)`, of a process that a signal ended.

    Args:
        code: its exit code, negative, as `subprocess` and `multiprocessing` have it.
        complaints: lines of its standard error.
    """
    words = last_words(complaints)
    # Most real-time signals have no name.
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"ended by {name}" + (f" (its last words: {words})" if words else "")


def last_words(complaints: Sequence[str]) -> str:
    """Return the last line that is not blank, cut where it is long; empty where there is none."""
    lines = [line.strip() for line in complaints if line.strip()]
    return lines[-1][:MAX_WORDS] if lines else ""


def ask_child(
    verb: str, arguments: Sequence[str] = (), *, given: Any = None, timeout_s: float, failure: str = "{why}"
) -> Any:
    """Return the answer of `python -m distbench.worker.child VERB ARGUMENTS`: its last line, read from JSON.

    A child that a signal ends is started once more: about one recording in 120 was aborted, and none of those twice.

    Args:
        given: plain data that it reads as JSON from its standard input; None for an empty one.
        timeout_s: seconds after which it is ended.
        failure: the message where there is no answer; `{why}` in it stands for the reason.

    Raises:
        UserError: it failed, did not end in time or printed no JSON; or it answers {"user_error": sentence}.
    """
    command = [sys.executable, "-m", CHILD, verb, *arguments]
    question = b"" if given is None else json.dumps(given).encode()
    code, lines, complaints = _answer_of(command, question, timeout_s, failure)
    if is_again := code < 0:
        sentence = f"distbench: a child process was {ended_text(code, complaints)}; it is started once more"
        print(printable(sentence), file=sys.stderr)
        code, lines, complaints = _answer_of(command, question, timeout_s, failure)
    try:
        if code:
            raise ValueError("a child that failed has no answer, whatever it printed")
        answer = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        why = f"it was {ended_text(code, complaints)}" if code < 0 else last_words(complaints) if code else ""
        why = (why or "it printed no answer") + (", the second time" if is_again else "")
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
