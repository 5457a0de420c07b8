"""Run files for the gate's tests: times chosen by hand, so that what must come out is known beforehand."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distbench.records.launches import Launch, launch_of
from distbench.records.run_file import read_run

CASE = "collective/f32[1024]/all_gather/tp"
OTHER = "collective/f32[65536]/all_gather/tp"
# Mean zero, so that a side's geometric mean is exactly what the test asks for.
WOBBLE = (0.03, -0.02, 0.01, -0.03, 0.02, -0.01, 0.015, -0.015, 0.005, -0.005)
ENVIRONMENT = {
    "machine": "box-1",
    "cpu_model": "cpu",
    "num_cpus": 4,
    "device": "cpu",
    "device_name": None,
    "backend": "gloo",
    "world_size": 4,
    "num_hosts": 1,
    "num_threads": 1,
    "scheduler": "batch",
    "load_at_start": [0.4, 0.4, 0.4],
    "torch": "2.13.0",
    "python": "3.11.7",
    "git_commit": "a" * 40,
    "git_dirty": False,
}
Samples = Sequence[float]


def case(samples: Samples = (), status: str = "ok", error: str | None = None) -> dict[str, Any]:
    return {"status": status, "samples_s": list(samples), "error": error}


def steady(center_s: float, index: int, count: int = 10) -> list[float]:
    """Samples whose mean and minimum are center_s, times this launch's wobble."""
    return [center_s * math.exp(WOBBLE[index % len(WOBBLE)])] * count


def records(
    run_id: str, started_at: float, cases: Mapping[str, dict[str, Any]], complete: bool = True, **changed: Any
) -> list[dict[str, Any]]:
    job = {
        "scenario": changed.pop("scenario", "collectives"),
        "variants": changed.pop("variants", [{"step": 4}]),
        "mesh": changed.pop("mesh", {"tp": 4}),
        "device": "cpu",
        "settings": {
            "iterations_per_sample": changed.pop("pipelined", 1),
            "max_samples": 200,
            **({"passes": changed.pop("passes")} if "passes" in changed else {}),
        },
        "started_at": started_at,
    }
    finished_at = changed.pop("finished_at", started_at)
    foreign, status = changed.pop("foreign_cpu", None), changed.pop("status", "complete")
    header = {"type": "run", "schema_version": 1, "run_id": run_id, "job": job}
    header["invocation_id"] = changed.pop("invocation_id", None)
    header["environment"] = {**ENVIRONMENT, **changed}
    lines = [{"type": "case", "case": {"id": name, "kind": "x", "params": {}}, **one} for name, one in cases.items()]
    footer = {"type": "footer", "status": status, "finished_at": finished_at}
    footer |= {"foreign_cpu": foreign} if foreign is not None else {}
    return [header, *lines, *([footer] if complete else [])]


def write(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_side(
    folder: Path,
    cases: Callable[[int], Mapping[str, dict[str, Any]]],
    count: int = 10,
    start: float = 1000.0,
    every: float = 100.0,
    **changed: Any,
) -> Path:
    """A folder of launches, `every` seconds apart from `start` on."""
    for index in range(count):
        name = f"{folder.name}-{index:02}"
        write(folder / f"{name}.jsonl", records(name, start + every * index, cases(index), **changed))
    return folder


def launches(folder: Path) -> list[Launch]:
    return [launch_of(read_run(path)) for path in sorted(folder.glob("*.jsonl"))]


def taking_turns(tmp_path: Path, before: float, after: float, count: int = 10, **changed: Any) -> tuple[Path, Path]:
    """Two folders of launches A B A B ..., one case that took `before` and takes `after` seconds."""
    base = write_side(tmp_path / "base", lambda index: {CASE: case(steady(before, index))}, count)
    new = write_side(
        tmp_path / "new", lambda index: {CASE: case(steady(after, index + 3))}, count, start=1050.0, **changed
    )
    return base, new
