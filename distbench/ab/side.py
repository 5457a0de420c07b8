"""One side of an A/B: where its code lies, with which Python and environment it is launched."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distbench.spec.errors import UserError
from distbench.spec.signals import stopped_as_interrupt

WORKING_TREE = "."
GIT_TIMEOUT_S = 120


@dataclass(frozen=True)
class Side:
    """One side.

    Args:
        name: "a" or "b".
        ref: what the user called it: a git revision, or "." for the working tree as it is.
        folder: where its code lies; launches run there and import from there first.
        python: the interpreter, whose torch is measured.
        commit: the revision's full hash; None for the working tree.
    """

    name: str
    ref: str
    folder: Path
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None

    def environment(self) -> dict[str, str]:
        """Of its launches: this process's, its own variables, and its code first among what is imported."""
        inherited = os.environ.get("PYTHONPATH")
        paths = [str(self.folder), *([inherited] if inherited else [])]
        return {**os.environ, **self.variables, "PYTHONPATH": os.pathsep.join(paths)}

    def text(self) -> str:
        """For a person: `a: main (1a2b3c4d), NCCL_ALGO=Tree`."""
        said = [f"{self.ref} ({self.commit[:8]})" if self.commit else "the working tree"]
        said += [f"{name}={value}" for name, value in self.variables.items()]
        said += [self.python] if self.python != sys.executable else []
        return f"{self.name}: {', '.join(said)}"


def parse_variables(texts: Sequence[str], option: str) -> dict[str, str]:
    """`["NCCL_ALGO=Tree"]` to a mapping; a UserError for a text that is not NAME=VALUE."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{option} {text!r} is not NAME=VALUE, such as {option} NCCL_ALGO=Tree")
        found[name] = value
    return found


def python_at(text: str | None, option: str) -> str:
    """The interpreter that the user means, as an absolute path, or a UserError; None is this process's own.

    Links are kept: a virtual environment's python is one, and what it points to knows nothing of the environment.
    """
    if text is None:
        return sys.executable
    found = shutil.which(text)
    if found is None:
        raise UserError(f"{option} {text} is no program that can be started; give the path of a Python that has torch")
    return str(Path(found).absolute())


@contextlib.contextmanager
def checked_out(sides: Sequence[Side]) -> Iterator[list[Side]]:
    """Each side's revision in a worktree of its own, taken away at the end, also when a signal asks for it.

    The working tree stays where it is.

    Raises:
        KeyboardInterrupt: SIGTERM or SIGHUP.
        UserError: this is no git repository, or it has no such revision.
    """
    root = _root() if any(side.ref != WORKING_TREE for side in sides) else None
    commits = {side.ref: _commit_of(side.ref, root) for side in sides if root and side.ref != WORKING_TREE}
    with stopped_as_interrupt(), contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="distbench-ab-")))
        found = []
        for side in sides:
            if root is None or side.ref == WORKING_TREE:
                found.append(side)
                continue
            tree = folder / side.name
            undo.callback(_run, ["worktree", "remove", "--force", "--force", str(tree)], root)
            done = _run(["worktree", "add", "--detach", str(tree), commits[side.ref]], root)
            if done.returncode:
                raise UserError(f"git worktree failed: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
            here = tree / Path.cwd().relative_to(root)
            if not here.is_dir():
                raise UserError(f"{side.ref} has no folder {Path.cwd().relative_to(root)}; run ab from one it has")
            found.append(replace(side, folder=here, commit=commits[side.ref]))
        yield found


def _commit_of(ref: str, root: Path) -> str:
    done = _run(["rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"], root)
    if done.returncode:
        give = "give a branch, tag or commit, or . for the working tree"
        raise UserError(f"{ref!r} is no revision of this git repository; {give}")
    return done.stdout.strip()


def _root() -> Path:
    done = _run(["rev-parse", "--show-toplevel"], Path.cwd())
    if done.returncode:
        raise UserError(
            "ab compares git revisions, and this folder is in no git repository; go to one, or give . twice"
        )
    return Path(done.stdout.strip())


def _run(arguments: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    command = ["git", *arguments]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"git cannot be run: {error}") from error
