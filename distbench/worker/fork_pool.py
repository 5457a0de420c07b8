"""Questions answered by forked processes, one a question, which have torch imported and nothing else done.

Importing torch takes longer than most answers. A second question in the same process would find what the first one left
behind: DTensor keeps what it planned for a mesh, in backward's thread too, and serves it to an equal mesh later,
whatever groups that one has.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, BinaryIO

from distbench.processes.ask_child import ended_text, last_words


@dataclass
class Question:
    """A question, and its answer once that is there.

    Args:
        data: the question.
        answer: None where its process ended without one.
        why: how the process ended then, in words.
        again: how a first process ended by a signal, in words; empty where none did. The second one gave the answer.
    """

    data: Any
    answer: Any = None
    why: str = ""
    again: str = ""


class ForkPool:
    """Has each question answered by a process forked from this one, which must have done no work in torch before.

    A question whose process a signal ends is asked once more.

    Args:
        function: from a question to its answer, both plain data.
        num_at_once: how many processes run at the same time at most.
    """

    def __init__(self, function: Callable[[Any], Any], num_at_once: int) -> None:
        self._function, self._num_at_once = function, num_at_once
        self._waiting: deque[Question] = deque()
        self._running: dict[Connection, tuple[Question, BaseProcess, BinaryIO]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether some question has no answer yet."""
        return bool(self._waiting or self._running)

    def ask(self, data: Any) -> None:
        """Take in a question."""
        self._waiting.append(Question(data))

    def wait(self, files: Sequence[int] = ()) -> tuple[list[Question], bool]:
        """Return when a question is answered, or one of some files can be read: the questions, and whether one can."""
        while self._waiting and len(self._running) < self._num_at_once:
            self._start(self._waiting.popleft())
        ready = wait([*self._running, *files])
        ended = [self._ended(connection) for connection in ready if isinstance(connection, Connection)]
        return [question for question in ended if question], len(ready) > len(ended)

    def _start(self, question: Question) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `_ended` closes it
        process = context.Process(target=self._answer, args=(question, sender, stderr.fileno()))
        process.start()
        # While this process holds the sending end too, a child that dies would never be noticed.
        sender.close()
        self._running[receiver] = question, process, stderr

    def _answer(self, question: Question, sender: Connection, stderr: int) -> None:
        """In the forked process: send the answer, and the modules that torch imported for it."""
        os.dup2(stderr, 2)
        warnings.simplefilter("ignore")
        before = {*sys.modules}
        answer = self._function(question.data)
        sender.send((answer, [name for name in [*sys.modules] if name.startswith("torch.") and name not in before]))

    def _ended(self, connection: Connection) -> Question | None:
        """The question of a process that has ended; None where it is asked once more."""
        question, process, stderr = self._running.pop(connection)
        modules: list[str] = []
        with stderr:
            with connection, contextlib.suppress(EOFError):
                question.answer, modules = connection.recv()
            process.join()
            stderr.seek(0)
            stderr_lines = stderr.read().decode("utf-8", "replace").splitlines()
        _import(modules)
        code = process.exitcode or 0
        if question.answer is None and code < 0 and not question.again:
            self._waiting.appendleft(Question(question.data, again=ended_text(code, stderr_lines)))
            return None
        if question.answer is None and code < 0:
            question.why = f"its process was {ended_text(code, stderr_lines)}, the second time"
        elif question.answer is None:
            words = f" (its last words: {last_words(stderr_lines)})" if last_words(stderr_lines) else ""
            question.why = f"its process ended with exit code {code} and without an answer{words}"
        return question


def _import(modules: Sequence[str]) -> None:
    """What torch imports once it is used, a fifth of what an answer takes: the next processes have it already."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # processes that are forked from here on need not look through it for garbage
