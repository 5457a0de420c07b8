"""`./run.sh bench [--quick] [NAME...]`: run the benchmarks (all, or those named) and print the table of promises.

The table goes to stdout as it grows, each measurement beside its bound to stderr.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from benchmarks.claims import HEAD, benchmark, detail, holds, lines, names


def main(arguments: Sequence[str]) -> int:
    """Run and print; 0 when every promise holds, 2 for a benchmark that does not exist."""
    parser = argparse.ArgumentParser(prog="./run.sh bench", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"out of {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="leave out what takes more than about two minutes")
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
        module, rows = benchmark(name), None
        if not (given.quick and getattr(module, "IS_LONG", False)):
            print(f"{name}:", file=sys.stderr, flush=True)
            with redirect_stdout(sys.stderr):
                rows = module.main()
            print("\n".join(map(detail, rows)), file=sys.stderr, flush=True)
            kept &= all(map(holds, rows))
        for line in lines(name, rows):
            print(line, flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
