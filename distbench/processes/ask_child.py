"""A question that only torch can answer: one child process is asked, and its last line is the answer."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from distbench.processes import start_supervised, stop_supervised
from distbench.spec.errors import UserError
from distbench.spec.printable_text import printable

CHILD = "distbench.worker.child"
MAX_WORDS = 300


def ended_text(code: int, complaints: Sequence[str]) -> str:
    """`ended by SIGABRT (its last words: ...)`, of a process that a signal ended.

    Args:
        code: its exit code, negative, as `subprocess` and `multiprocessing` have it.
        complaints: lines of its standard error.
    """
    words = last_words(complaints)
    # Most real-time signals have no name.
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"ended by {name}" + (f" (its last words: {words})" if words else "")


def last_words(complaints: Sequence[str]) -> str:
    """The last line that is not blank, cut where it is long; empty where there is none."""
    lines = [line.strip() for line in complaints if line.strip()]
    return lines[-1][:MAX_WORDS] if lines else ""


def ask_child(
    verb: str, arguments: Sequence[str] = (), *, given: Any = None, timeout_s: float, failure: str = "{why}"
) -> Any:
    """What `python -m distbench.worker.child VERB ARGUMENTS` answers, read from JSON.

    A child that a signal ends is started once more: about one recording in 120 was aborted, and none of those twice.

    Args:
        given: plain data that it reads as JSON from its standard input; None for an empty one.
        timeout_s: seconds after which it is ended and given up.
        failure: what to say where there is no answer; `{why}` in it stands for the reason.

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
        why = _why(code, complaints) + (", the second time" if is_again else "")
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
            printed, error_output = child.communicate(question, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise UserError(failure.replace("{why}", f"it did not end within {timeout_s:g} s")) from error
        finally:
            stop_supervised(child)
    lines, complaints = (text.decode("utf-8", "replace").splitlines() for text in (printed, error_output))
    return child.returncode, lines, complaints


def _why(code: int, complaints: list[str]) -> str:
    if code < 0:
        return f"it was {ended_text(code, complaints)}"
    return (last_words(complaints) if code else "") or "it printed no answer"
