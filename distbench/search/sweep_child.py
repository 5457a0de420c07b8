"""The sweep's child process: one import of torch for all queries, with a folder of recordings."""

import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from distbench.processes import CHILD, ended_text, last_words, start_supervised, stop_supervised
from distbench.search.space import Candidate, Setup
from distbench.spec.assumptions import Assumption
from distbench.spec.errors import UserError
from distbench.spec.file_io import write_whole
from distbench.spec.job import digest_of, is_knob, mesh_of
from distbench.spec.json_decoder import Format, read_record
from distbench.spec.versions import installed_torch

NUM_AT_ONCE = 2
KEPT_ANSWERS = "facts", "code"  # queries with an answer file, so that a finished sweep starts no process with --reuse
END_S = 5.0
OWN_FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True)
class Question:
    """A query about some variants on one mesh.

    Args:
        `ask`: "facts", "record", "check", "code" or "fit", the child's queries.
        about: further parts of a query, as plain data.
    """

    ask: str
    variants: Sequence[Mapping[str, Any]]
    mesh: Mapping[str, int]
    about: Mapping[str, Any] = field(default_factory=dict)


class Answers(msgspec.Struct):
    """Content of the file of a query's answers, one per variant."""

    answers: list[Any]


class LeftOut(msgspec.Struct):
    """Content of the file of a variant without a recording: the reason."""

    left_out: str


def code_of_file(file: Path) -> list[Any]:
    """Return all inputs of a scenario file's results: the file, the other files of its folder, which may have the
    model, distbench's own files, and the version of torch.
    """
    files = {file, *file.parent.glob("*.py"), *OWN_FOLDER.rglob("*.py"), *OWN_FOLDER.rglob("*.json")}
    return [installed_torch(), *sorted((str(path), digest_of(path)) for path in files)]


def digest(what: Sequence[Any]) -> str:
    """Return a digest of plain data, and of other objects by their text."""
    return hashlib.sha256(json.dumps(what, default=repr).encode()).hexdigest()[:20]


class SweepChild:
    """Sender of queries to the child process, which ends with the `with` block.

    Args:
        file: declares the scenario.
        folder: folder of recording files; None for a temporary folder.
        resume: reuse recordings in the folder.
        assume: see `assumptions_of`.
    """

    def __init__(
        self,
        file: Path,
        scenario: str,
        folder: Path | None = None,
        resume: bool = False,
        assume: Mapping[str, Assumption] | None = None,
    ) -> None:
        self._file, self._scenario, self._resume = file, scenario, resume
        self._assume = json.dumps(assume or {})
        self._code = [*code_of_file(file), self._assume]
        self._undo = contextlib.ExitStack()
        self._folder = folder or Path(self._undo.enter_context(tempfile.TemporaryDirectory()))
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: BinaryIO | None = None
        self._recent: set[Path] = set()  # recordings of this process
        self.num_reused = 0
        self.again: list[str] = []  # how processes ended that were started again

    def __enter__(self) -> "SweepChild":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            stop_supervised(self._process)
            for stream in filter(None, (self._process.stdin, self._process.stdout)):
                with contextlib.suppress(OSError):
                    stream.close()
        self._undo.close()

    def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (place of the query, answer) as answers come; existing recordings come first.

        An answer has `seconds`, and `answers`, one per variant, or `left_out`, a reason. Answers to "record" are files.

        Raises:
            UserError: the child process failed.
        """
        waiting = dict(enumerate(questions))
        for place, question in enumerate(questions):
            if (recorded := self._known(question)) is not None:
                self.num_reused += question.ask == "record" and not self._is_recent(question)
                del waiting[place]
                yield place, recorded
        for place, question in waiting.items():
            self._send(place, question)
        while waiting:
            assert self._process is not None and self._process.stdout is not None
            try:
                answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            except ValueError as error:
                raise self._failed() from error
            place = answer.pop("id")
            question = waiting.pop(place)
            if ended := answer.pop("again", None):
                self.again.append(str(ended))
            if question.ask == "record":
                answer = self._recorded(question, answer)
            elif question.ask in KEPT_ANSWERS and "answers" in answer:
                write_whole(self._answers_file(question), json.dumps({"answers": answer["answers"]}))
            yield place, answer

    def _recorded(self, question: Question, answer: dict[str, Any]) -> dict[str, Any]:
        if "left_out" in answer:
            if answer.get("lasts"):
                write_whole(self._kept(question, question.variants[0], ".json"), json.dumps(answer))
            return answer
        files = [self._kept(question, variant) for variant in question.variants]
        self._recent.update(files)
        return {**answer, "answers": [str(file) for file in files]}

    def forget(self, question: Question) -> None:
        """Delete earlier recordings of a query."""
        for variant in question.variants:
            self._kept(question, variant).unlink(missing_ok=True)

    def answers(self, question: Question) -> list[Any]:
        """Return the answers to a query, one per variant; UserError without an answer."""
        ((_, answer),) = self.ask([question])
        if "left_out" in answer:
            raise UserError(f"no sweep of scenario {self._scenario!r}: {answer['left_out']}")
        return list(answer["answers"])

    def _known(self, question: Question) -> dict[str, Any] | None:
        if self._resume and question.ask in KEPT_ANSWERS and (kept := self._answers_file(question)).is_file():
            with contextlib.suppress(UserError):
                return msgspec.structs.asdict(read_record(kept, Answers, Format("answer", "delete it")))
        if question.ask != "record" or not (self._resume or self._is_recent(question)):
            return None
        files = [self._kept(question, variant) for variant in question.variants]
        if all(file.is_file() for file in files):
            return {"answers": [str(file) for file in files]}
        if (why := self._kept(question, question.variants[0], ".json")).is_file():
            with contextlib.suppress(UserError):  # the query is repeated for a damaged file, as for a damaged recording
                return msgspec.structs.asdict(read_record(why, LeftOut, Format("answer", "delete it")))
        return None

    def _is_recent(self, question: Question) -> bool:
        return all(self._kept(question, variant) in self._recent for variant in question.variants)

    def _answers_file(self, question: Question) -> Path:
        variants = [sorted(variant.items()) for variant in question.variants]
        parts = [*self._code, self._scenario, question.ask, variants, [*question.mesh.items()]]
        return self._folder / f"{digest(parts)}.{question.ask}.json"

    def _kept(self, question: Question, variant: Mapping[str, Any], suffix: str = ".jsonl") -> Path:
        """Return the file of a variant's recording, named by a digest of the recording's inputs."""
        parts = [*self._code, self._scenario, sorted(variant.items()), [*question.mesh.items()]]
        return self._folder / (digest(parts) + suffix)

    def _send(self, place: int, question: Question) -> None:
        process = self._process or self._started()
        first = question.variants[0]
        record = {
            **question.about,
            "id": place,
            "ask": question.ask,
            "variants": [dict(variant) for variant in question.variants],
            "files": [str(self._kept(question, variant)) for variant in question.variants],
            "mesh": mesh_of(first, question.mesh),
            "label": ",".join(f"{name}={value}" for name, value in first.items() if is_knob(name)),
        }
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(record).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise self._failed() from error

    def _started(self) -> "subprocess.Popen[bytes]":
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--results {self._folder} cannot be created ({error.strerror}); give another folder"
            ) from error
        self._stderr = self._undo.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - `with` of this object ends it
        self._process = start_supervised(
            [sys.executable, "-m", CHILD, "sweep", str(self._file), self._scenario, str(NUM_AT_ONCE), self._assume],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        return self._process

    def _failed(self) -> UserError:
        assert self._process is not None and self._stderr is not None
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").splitlines()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)  # the pipe closes before the exit code is available
        code = self._process.returncode or 0
        why = f"its process was {ended_text(code, lines)}" if code < 0 else last_words(lines)
        return UserError(
            f"no step of {self._scenario} was recorded ({why or 'its process printed no answer'}); check the scenario "
            "with distbench check"
        )


def facts_of(setup: Setup, child: SweepChild) -> dict[str, Any]:
    """Return the child's facts of the scenario's plan and model."""
    (facts,) = child.answers(Question("facts", [setup.base], setup.mesh))
    return dict(facts)


def legal(
    child: SweepChild, setup: Setup, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], dict[Candidate, str]]:
    """Return the candidates with working plans, and the reasons why other candidates do not work."""
    questions = [Question("check", [candidate.variant(setup.base)], candidate.mesh) for candidate in candidates]
    answers = child.ask(questions)
    wrong = {candidates[place]: str(answer["left_out"]) for place, answer in answers if "left_out" in answer}
    return [candidate for candidate in candidates if candidate not in wrong], wrong


class PlanCode(NamedTuple):
    """A candidate as Python.

    Args:
        plan: imports, `mesh = ...` and `plan = ...`; only the changes if a value of the plan has no text.
        imports, changes: lines that change the plan as written to this plan; a scenario's own parameter is a comment
            with its option.
    """

    plan: list[str]
    imports: list[str]
    changes: list[str]


def code_of(setup: Setup, child: SweepChild, candidates: Sequence[Candidate]) -> dict[Candidate, PlanCode]:
    """Return each candidate as Python code from the child process."""
    variants = [setup.base, *(candidate.variant(setup.base) for candidate in candidates)]
    _, *answers = child.answers(Question("code", variants, setup.mesh))
    codes = {}
    for candidate, answer in zip(candidates, answers, strict=True):
        *imports, change = answer["change"] or [""]
        set_lines = [f"# --set {name}={value}" for name, value in candidate.choices if not is_knob(name)]
        changes = [line for line in (change, *set_lines) if line]
        as_it_is = f"# plan: as in {setup.entry.file.name}, with a value that cannot be written as code"
        *plan_imports, plan = answer["plan"] or [*imports, "\n".join([as_it_is, *changes])]
        lines = [*plan_imports, *([""] if plan_imports else []), f"mesh = {candidate.mesh!r}", *plan.splitlines()]
        codes[candidate] = PlanCode(lines, imports, changes)
    return codes
