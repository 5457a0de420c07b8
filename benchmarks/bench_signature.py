"""The exact gate on a loaded machine: no false alarm in many reruns, and every seeded change of a plan seen.

`python -m benchmarks.bench_signature --reruns 200` reruns the shipped scenarios, each in a process of its own, against
their baselines in `signatures/`; each round of scenarios is a command of its own, and so has another hash seed. Busy
processes run beside it all the time.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.claims import Claim, Row
from distbench.judge.communication_signature import OF_TORCH, SUFFIX, Signature, compare, differences, load, text

ROOT = Path(__file__).parent.parent
BASELINES, CHANGES = ROOT / "signatures", ROOT / "tests" / "data" / "plan_changes.py"
RERUNS, NUM_BUSY, NUM_CHANGES = 200, 4, 20
# It ends by itself when the benchmark is gone, however that ended.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"

CLAIMS = (
    Claim(
        f"false alarms of the signature gate in {RERUNS} reruns on a loaded machine; of {NUM_CHANGES} seeded changes "
        "of a plan: detected, with the right module",
        "{:.0f}; {:.0f}, {:.0f}",
        f"0; {NUM_CHANGES}, {NUM_CHANGES}",
    ),
)
IS_LONG = True


def main(num_reruns: int = RERUNS) -> list[Row]:
    """Rows for the benchmark table."""
    with tempfile.TemporaryDirectory() as folder, busy(NUM_BUSY):
        alarms = false_alarms(num_reruns, Path(folder))
        seen, named = changes_seen(Path(folder))
    return [
        (f"false alarms of {num_reruns} reruns beside {NUM_BUSY} busy processes", float(alarms), 0.0),
        (f"seeded plan changes seen, of {NUM_CHANGES}", float(seen), -float(NUM_CHANGES)),
        (f"seeded plan changes whose module is named, of {NUM_CHANGES}", float(named), -float(NUM_CHANGES)),
    ]


@contextlib.contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """That many processes that keep a CPU busy each, as far as there are CPUs."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def write_signatures(scenarios: Sequence[str], folder: Path, *options: str) -> None:
    """One `distbench signature` command."""
    command = [
        sys.executable,
        "-m",
        "distbench",
        "signature",
        "write",
        *scenarios,
        *options,
        "--output-dir",
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)


def false_alarms(num_reruns: int, folder: Path) -> int:
    """How many of so many reruns are not as their baseline, round by round over all scenarios with a baseline."""
    names = sorted(path.stem for path in BASELINES.glob(f"*{SUFFIX}") if not OF_TORCH.fullmatch(path.name))
    alarms = 0
    for start in range(0, num_reruns, len(names)):
        chosen = names[: num_reruns - start]
        write_signatures(chosen, folder / "new", "--quick")
        for name in chosen:
            comparison = compare(BASELINES / f"{name}{SUFFIX}", folder / "new" / f"{name}{SUFFIX}")
            if comparison.exit_code:
                alarms += 1
                print(f"false alarm: {text(comparison)}", file=sys.stderr)
        print(f"  {start + len(chosen)} reruns, {alarms} false alarms", file=sys.stderr, flush=True)
    return alarms


def changes_seen(folder: Path) -> tuple[int, int]:
    """(seen at all, seen with the changed module named) of the seeded changes."""
    sys.path.insert(0, str(CHANGES.parent))
    from plan_changes import NAMED

    (folder / "changes").mkdir()
    write_signatures([str(CHANGES)], folder / "changes")
    result = load(folder / "changes" / f"plan_changes{SUFFIX}")
    message = {change: texts for change, texts in said_of(result).items() if texts}
    named = [change for change, texts in message.items() if any(f": {NAMED[change]}, " in text for text in texts)]
    return len(message), len(named)


def said_of(result: Signature) -> dict[str, list[str]]:
    """Change to how its case differs from the case without a change."""
    by_change = {case.partition("change=")[2]: counts for case, counts in result.cases.items()}
    plain = by_change.pop("none")

    def one(counts: object) -> Signature:
        return Signature("plan", result.mesh, result.torch, {"step": counts})  # type: ignore[dict-item]

    return {change: differences(one(plain), one(counts)) for change, counts in by_change.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reruns", type=int, default=RERUNS)
    for name, measured, allowed in main(parser.parse_args().reruns):
        print(f"{name}: {measured:g} (allowed {allowed:g})")
