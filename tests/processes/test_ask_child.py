"""One child process asked: its answer, and the one sentence where there is none. The children are plain Python."""

import time
from pathlib import Path

import pytest

from distbench.processes import ask_child
from distbench.spec.errors import UserError
from processes import PATIENCE_S, Children

ANSWERS = "import sys; print('noise'); print('{\"said\": \"%s %s %s\"}' % (*sys.argv[1:], sys.stdin.read()))"


@pytest.fixture
def some_child(children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("distbench.processes.CHILD", "some_child")
    return tmp_path / "some_child.py"


def test_the_last_line_is_the_answer(some_child: Path) -> None:
    some_child.write_text(ANSWERS)
    assert ask_child("verb", ["a"], given=[1], timeout_s=60) == {"said": "verb a [1]"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ValueError('no such thing')", "torch: ValueError: no such thing; try"),
        # A number that a scenario printed is no answer of a child that failed.
        ("print(3); raise ValueError('after it')", "torch: ValueError: after it; try"),
        ("print('no JSON')", "torch: the child process printed no answer; try"),
        ("import os; os.kill(os.getpid(), 9)", "torch: the child process was ended by SIGKILL, second attempt; try"),
        ("import time; time.sleep(60)", "torch: no answer within 0.5 s; try"),
        ('print(\'{"user_error": "mend this"}\')', "^mend this$"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\n')", "torch: the child process printed no answer; try"),
    ],
)
def test_no_answer_is_one_sentence(some_child: Path, source: str, message: str) -> None:
    some_child.write_text(source)
    with pytest.raises(UserError, match=message):
        ask_child("verb", timeout_s=0.5 if "sleep" in source else 60, failure="torch: {why}; try")


def test_a_child_that_a_signal_ends_is_started_once_more(
    some_child: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aborts = "import os, sys\nprint('last words', file=sys.stderr, flush=True)\n"
    once = (
        f"{aborts}if not os.path.exists({str(tmp_path / 'second')!r}):\n    open({str(tmp_path / 'second')!r}, 'w')\n"
    )
    some_child.write_text(f"{once}    os.abort()\nprint(7)")
    assert ask_child("verb", timeout_s=60) == 7
    assert "ended by SIGABRT (its last words: last words)" in capsys.readouterr().err
    some_child.write_text(f"{aborts}os.abort()")
    with pytest.raises(
        UserError, match=r"the child process was ended by SIGABRT \(its last words: last words\), second attempt"
    ):
        ask_child("verb", timeout_s=60)


def test_what_a_child_leaves_behind_is_ended_and_not_waited_for(some_child: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    some_child.write_text(
        "import os, time\nchild = os.fork()\nif child == 0:\n    os.setsid()\n    time.sleep(60)\n"
        f"open({str(pid)!r}, 'w').write(str(child))\nprint(3)"
    )
    began = time.monotonic()
    assert ask_child("verb", timeout_s=50) == 3 and time.monotonic() - began < 50
    ended = time.monotonic() + PATIENCE_S
    while is_alive(int(pid.read_text())) and time.monotonic() < ended:
        time.sleep(0.05)
    assert not is_alive(int(pid.read_text()))


def is_alive(pid: int) -> bool:
    """A zombie that nobody has collected is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
