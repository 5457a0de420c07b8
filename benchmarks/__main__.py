"""`./run.sh bench [--quick] [NAME...]`: run the benchmarks (all, or those named) and print the table of promises.

The table goes to stdout as it grows, each measurement beside its bound to stderr.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.claims import HEAD, Row, benchmark, detail, holds, lines, names

# Seconds after which a benchmark is stopped, and between its SIGTERM and its SIGKILL.
LIMIT_S, LONG_LIMIT_S, END_S = 900, 3 * 3600, 30


def main(arguments: Sequence[str]) -> int:
    """Run and print; 0 when every promise holds, 2 for a benchmark that does not exist."""
    parser = argparse.ArgumentParser(prog="./run.sh bench", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"out of {', '.join(names())}")
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes more than about two minutes, or measure a part of it"
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.name if name not in names()]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    # Who has distbench installed has it compiled, also in a container whose image sets this.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print(HEAD, flush=True)
    kept = True
    for name in given.name or names():
        module = benchmark(name)
        is_long = getattr(module, "IS_LONG", False)
        rows, why_not = None, "left out by --quick"
        function = "quick" if given.quick and hasattr(module, "quick") else "main"
        if function == "quick" or not (given.quick and is_long):
            print(f"{name}:", file=sys.stderr, flush=True)
            limit_s = LONG_LIMIT_S if is_long and not given.quick else LIMIT_S
            rows, why_not = measured(module.__name__, limit_s, function), "not measured"
            print("\n".join(map(detail, rows or ())), file=sys.stderr, flush=True)
            kept &= rows is not None and all(map(holds, rows))
        for line in lines(name, rows, why_not):
            print(line, flush=True)
    return 0 if kept else 1


def measured(module: str, limit_s: float, function: str = "main") -> list[Row] | None:
    """Return a benchmark's rows; None, and a sentence on stderr, where it fails or takes longer than `limit_s`.

    It has a session of its own, which is ended as a whole: a benchmark that hangs leaves no ranks and no daemons.
    """
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks.measure", module, str(file), function]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"{module} did not end within {limit_s:g} s and was stopped", file=sys.stderr, flush=True)
            return None
        finally:
            end(process)
        if code or not file.exists():
            print(f"{module} ended with exit code {code}, without rows", file=sys.stderr, flush=True)
            return None
        return [(one, value, allowed) for one, value, allowed in json.loads(file.read_text())]


def end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a session: politely first, so that a benchmark removes what it made."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
