"""Files that are not what a command expects: of other kinds, cut, of other tools, named with anything."""

import gzip
import json
from pathlib import Path

from benchmarks.faulty_call import FaultyCall

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
STEPS = (GOLDEN / "steps.jsonl").read_bytes()
LINES = STEPS.decode().splitlines()
HEADER, CASE = json.loads(LINES[0]), json.loads(LINES[1])
NONE = "not a distbench run file"
TOY = """from distbench.spec import Collectives, Scenario, scenario

@scenario(mesh={"tp": 2}, axes={"size_bytes": (1024, 2048)})
def toy(*, size_bytes: int = 1024) -> Scenario:
    return Scenario(collectives=(Collectives(ops=("all_gather",), sizes_bytes=(size_bytes,)),))
"""


def with_case(**fields: object) -> str:
    """A run file whose first case has other fields."""
    return "\n".join([LINES[0], json.dumps({**CASE, **fields}), *LINES[2:]]) + "\n"


def read(name: str, content: str | bytes, message: str, command: str = "report x.jsonl", code: int = 2) -> FaultyCall:
    """A file x.jsonl, and a command that reads it."""
    return FaultyCall(f"run file: {name}", f"distbench {command}", message, code, {"x.jsonl": content})


RUN_FILES = (
    read("empty", "", NONE),
    read("one line break", "\n", NONE),
    read("binary", bytes(range(256)) * 50, NONE),
    read("zeros", bytes(100_000), NONE),
    read("compressed", gzip.compress(STEPS), NONE),
    read("UTF-16", STEPS.decode().encode("utf-16"), NONE),
    read("a byte order mark before it", b"\xef\xbb\xbf" + STEPS, "", code=0),
    read("line ends of Windows", STEPS.replace(b"\n", b"\r\n"), "", code=0),
    read("cut in the header", STEPS[:300], NONE),
    read("cut in a case", STEPS[: len(LINES[0]) + 200], "not a complete record|no case", code=0),
    read("its header alone", LINES[0] + "\n", "0 finished cases are shown", code=0),
    read("of a newer distbench", json.dumps({**HEADER, "schema_version": 99}), "newer|update"),
    read("a list", "[1, 2, 3]", NONE),
    read("a table", "name,time\na,1\n", NONE),
    read("of pytest-benchmark", json.dumps({"machine_info": {}, "benchmarks": []}), NONE),
    read("of pyperf", json.dumps({"benchmarks": [{"runs": []}], "version": "1.0"}), NONE),
    read("a page", "<!DOCTYPE html><p>404", NONE),
    read("a line of 50 MB", LINES[0] + "\n" + "x" * 50_000_000 + "\n", "line 2: not a complete record", code=0),
    read("negative samples", with_case(samples_s=[-1.0] * 9), r"line 2: samples_s\[0\] is -1.0", code=0),
    read("samples that are text", with_case(samples_s=["1"] * 9), "line 2: samples_s", code=0),
    read("a status that nobody knows", with_case(status="fine"), "line 2: status", code=0),
    read("a case without an id", with_case(case={"kind": "step"}), "line 2: case.id|line 2:", code=0),
    read("a case id of two lines", with_case(case={**CASE["case"], "id": "step/a\n::error::b"}), "", code=0),
    read(
        "a formula as case id", with_case(case={**CASE["case"], "id": "=1+1"}), "'=1", "report x.jsonl --format csv", 0
    ),
    read("two runs", STEPS + STEPS, "second run header"),
    read("as baseline", STEPS, "cannot be read|not a baseline", "baseline show x.jsonl"),
    read("as signature", STEPS, "x.jsonl", "signature check x.jsonl x.jsonl"),
    read("as profile", STEPS, "x.jsonl", 'plan "S(0)" R --shape 8 --mesh 2 --profile x.jsonl'),
    read("as scenario", STEPS, "no scenario 'x.jsonl'|no scenario", "run x.jsonl"),
)


def made(name: str, make: str, command: str, message: str, code: int = 2) -> FaultyCall:
    """Something that a shell makes before the command."""
    return FaultyCall(
        f"files: {name}", f"{make}\ndistbench {command}", message, code, {"good.jsonl": STEPS, "toy.py": TOY}
    )


MADE = (
    made("a pipe as run file", "mkfifo x", "report x", "it is a pipe"),
    made("a device as run file", "", "report /dev/zero", "it is a device"),
    made("a terminal as run file", "", "report /dev/tty", "it is a device"),
    made(
        "a socket as run file",
        "$PYTHON -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"x\")'",
        "report x",
        "a socket",
    ),
    made("a loop of links as run file", "ln -s x x", "report x", "does not exist|symbolic links"),
    made("a link to nothing", "ln -s none x", "report x", "does not exist"),
    made("a file in /proc", "", "report /proc/self/environ", "is not a distbench run file"),
    made("standard input", "", "report /dev/stdin", "it is a device"),
    made("an empty folder", "mkdir x", "report x", "contains no readable run file"),
    made(
        "a folder of pipes and loops",
        "mkdir x; mkfifo x/a.jsonl; ln -s b.jsonl x/b.jsonl; ln -s . x/c; cp good.jsonl x",
        "report x",
        "1 scenario: .* ok",
        0,
    ),
    made(
        "a folder with other files",
        "mkdir x; echo hi > x/a.jsonl; echo {} > x/b.json; cp good.jsonl x",
        "report x",
        "a.jsonl",
        0,
    ),
    made(
        "a folder within a hundred",
        "p=x; for i in $(seq 100); do p=$p/d; done; mkdir -p $p; cp good.jsonl $p",
        "report x",
        "",
        0,
    ),
    made(
        "3,000 files that are none",
        "mkdir x; cd x; touch $(seq -f %g.jsonl 3000); cp ../good.jsonl .; cd ..",
        "report x",
        "2995 more files",
        0,
    ),
    made("a name of two lines", "cp good.jsonl $'x\\ny.jsonl'", "report $'x\\ny.jsonl'", "", 0),
    made("a name that is no text", "cp good.jsonl $'x\\xff.jsonl'", "report $'x\\xff.jsonl'", "", 0),
    made(
        "a name that is no text, in a folder",
        "mkdir x; cp good.jsonl $'x/\\xff.jsonl'",
        "report x --page x/p.html",
        "page written",
        0,
    ),
    made("a missing name that is no text", "", "report $'x\\xff.jsonl'", "does not exist"),
    made("a name of terminal codes", "", "report $'\\e[31mx'", "does not exist"),
    made("a name like an option", "cp good.jsonl ./-x.jsonl", "report -x.jsonl", "No such option"),
    made("a hole of a terabyte", "truncate -s 1T x.jsonl", "report x.jsonl", "but the limit is"),
    made("a folder as scenario", "mkdir x", "run x", "is a folder"),
    made("a folder that ends with .py", "mkdir x.py", "run x.py", "is not a file"),
    made("a pipe as scenario", "mkfifo x.py", "run x.py", "is not a file"),
    made("a device as scenario", "ln -s /dev/zero x.py", "run x.py", "is not a file"),
    made("a scenario of a gigabyte", "truncate -s 1G x.py", "run x.py", "x.py cannot be read"),
    made("a scenario of zeros", "truncate -s 1000 x.py", "run x.py", "x.py"),
    made(
        "a scenario that is not UTF-8", "printf '# -*- coding: latin-1 -*-\\n# \\xe9\\n' > x.py", "check x.py", "x.py"
    ),
    made("a scenario of brackets", "printf '(%.0s' $(seq 9999) > x.py", "check x.py", "x.py"),
    made("a scenario cut in the middle", "head -c 100 toy.py > x.py", "check x.py", "not valid Python"),
    made("a name that Python cannot import", "cp toy.py '1 2-3.py'", "check '1 2-3.py'", "toy", 0),
    made("a scenario named like a package", "cp toy.py torch.py", "check torch.py", "is not a package"),
)
FAULTS = (*RUN_FILES, *MADE)
