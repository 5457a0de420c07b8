"""`./run.sh torches [VERSION...|newest|all]`: doctor --deep, the fast tier and some tests of ranks with other torches.

Each torch is installed alone into build/torches/VERSION, and comes before the environment's own on Python's path: every
other package is the environment's. What it prints is also in build/torches/VERSION.log.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from stand_ins import make_stand_ins

from distbench.spec.versions import NEWEST, OLDEST, SUPPORTED, release

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "torches"
# The newest patch release of each minor version at the time of the last change of this list.
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
LIBRARIES_MADE = "stand_ins_made"
# Files whose tests of ranks and child processes depend most on torch's version.
RANK_TESTS = (
    *("observe/test_trace.py", "report/test_report_paths.py", "plans/test_pipelines.py", "search/test_sweep.py"),
    *("simulate/test_simulate.py", "simulate/test_simulated_run.py"),
    *("simulate/test_simulated_pipelines.py", "simulate/test_sim_scenarios.py"),
)
TAIL = 15  # lines of a failed step that are printed
NOT_INSTALLED = 3  # the exit code where a torch cannot be had here, so that nothing is known of it


def steps(versions_pytest: Sequence[str]) -> dict[str, list[str]]:
    """Name of each step to its command, after Python's."""
    pytest = ["-m", "pytest", *versions_pytest]
    files = [str(ROOT / "tests" / name) for name in RANK_TESTS]
    return {
        "doctor --deep": ["-m", "distbench", "doctor", "--deep"],
        "fast tier": [*pytest, "--fast"],
        "tests of ranks": [*pytest, "-m", "ranks or child", *files],
    }


def installed(version: str) -> Path | None:
    """The folder that goes onto Python's path for a version; None for the environment's own torch.

    Raises:
        SystemExit: it is outside of the bound, or (code NOT_INSTALLED) cannot be installed.
    """
    if not re.match(r"\d+\.\d+", version) or not OLDEST <= release(version) <= NEWEST:
        raise _ended(2, f"{version} is outside of {SUPPORTED}; give some of {', '.join(RELEASES)}, newest or all")
    if metadata.version("torch").partition("+")[0] == version:
        return None
    folder = FOLDER / version
    if not (folder / LIBRARIES_MADE).exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        again = "see above; then run the same command again"
        if subprocess.run([*pip, "--upgrade", "--target", str(folder), f"torch=={version}"], check=False).returncode:
            raise _ended(NOT_INSTALLED, f"pip could not install torch=={version}: {again}")
        try:
            names = make_stand_ins(folder / "torch", folder / "stand_ins")
        except (OSError, subprocess.CalledProcessError) as error:
            why = f"no stand-ins for torch's CUDA libraries: {error}; install gcc and binutils"
            raise _ended(NOT_INSTALLED, why) from error
        (folder / LIBRARIES_MADE).write_text("\n".join(names))
    return folder


def _ended(code: int, why: str) -> SystemExit:
    print(f"torches: {why}", file=sys.stderr)
    return SystemExit(code)


def tried(version: str, pytest_options: Sequence[str]) -> bool:
    """Whether every step passes with a version; prints a line per step."""
    folder = installed(version)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    FOLDER.mkdir(parents=True, exist_ok=True)
    all_passed = True
    with (FOLDER / f"{version}.log").open("w", encoding="utf-8") as log:
        for name, command in steps(pytest_options).items():
            begun = time.monotonic()
            done = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                text=True,
                errors="replace",
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            log.write(f"== {name}\n{done.stdout}\n")
            lines = done.stdout.splitlines()
            outcome, last = "passed" if done.returncode == 0 else "FAILED", lines[-1].strip("= ") if lines else ""
            print(f"torch {version}: {name}: {outcome} in {time.monotonic() - begun:.0f} s: {last}", flush=True)
            if done.returncode:
                print("\n".join(lines[-TAIL:]), flush=True)
                all_passed = False
    return all_passed


def main(arguments: Sequence[str]) -> int:
    """0 where everything passes with every version."""
    words = {"newest": RELEASES[-1:], "all": RELEASES}
    versions = [version for word in arguments for version in words.get(word, (word,))] or [RELEASES[0], RELEASES[-1]]
    processes = ["--numprocesses", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    results = [tried(version, processes) for version in versions]
    print(f"torches: {sum(results)} of {len(results)} versions passed; logs are in {FOLDER.relative_to(ROOT)}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
