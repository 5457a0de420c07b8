"""The files of one side of a comparison to its launches, whatever kind each file is."""

from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path

from distbench.records.baselines import read_baseline
from distbench.records.launch_values import Launch, launch_of
from distbench.records.nccl_tests import read_nccl_tests
from distbench.records.results_folder import read_each, run_files_in
from distbench.records.run_file import MAX_RUN_BYTES, no_garbage_collection, read_run
from distbench.spec.errors import UserError
from distbench.spec.file_io import opened

SNIFFED_BYTES = 512


def read_side(paths: Iterable[Path], side: str, warnings: list[str]) -> list[Launch]:
    """The launches of one side, oldest first.

    Args:
        paths: run files, baseline files, nccl-tests' JSON files, and folders of them.
        side: what messages call it.
        warnings: sentences are added here: files left out, lines that could not be read.

    Raises:
        UserError: a path does not exist, or a named file is none of these.
    """
    launches: dict[str, Launch] = {}
    with no_garbage_collection():
        for path in paths:
            launches.update({launch.run_id: launch for launch in _read_path(path, side, warnings)})
    return sorted(launches.values(), key=lambda launch: (launch.started_at, launch.source))


def _read_path(path: Path, side: str, warnings: list[str]) -> list[Launch]:
    if path.is_dir():
        json_files = sorted(file for file in path.rglob("*.json") if file.is_file())
        kinds = read_each(json_files, lambda file: (file, _sniffed(file)), warnings)
        files = [*run_files_in(path), *(file for file, kind in kinds if kind)]
        return list(chain.from_iterable(read_each(files, partial(_read_file, warnings=warnings), warnings)))
    if not path.exists():
        raise UserError(f"{side} {path} does not exist; give run files or a folder of them, such as results/")
    return _read_file(path, warnings)


def _read_file(path: Path, warnings: list[str]) -> list[Launch]:
    """The launches that one file holds: one of a run file, several of a baseline."""
    kind = _sniffed(path)
    if kind == "baseline":
        return read_baseline(path)
    run = read_nccl_tests(path) if kind == "nccl-tests" else read_run(path)
    if run.is_simulated:
        instead = "distbench compare shows predicted times, gate --signature compares what it communicates"
        raise UserError(f"{path} is a simulated run, which holds no measured time; {instead}")
    warnings += run.warnings
    return [launch_of(run)]


def _sniffed(path: Path) -> str | None:
    """What a JSON file is, by its first bytes: "baseline", "nccl-tests", or None for anything else."""
    with opened(path, "file", MAX_RUN_BYTES) as file:
        head = file.read(SNIFFED_BYTES)
    if b'"distbench_baseline"' in head:
        return "baseline"
    return "nccl-tests" if b'"version"' in head and b'"start_time"' in head and b'"args"' in head else None
