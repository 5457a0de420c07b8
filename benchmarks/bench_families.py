"""Families of transformers by their configs' defaults, under each command: right, or one sentence with a way out.

`hf_families.py` has them. `check`, `run --trace-paths`, a simulation and `tune --around-my-plan` of each, FSDP2. Where
dropout is a default, a step must be `wrong`, with that as its cause. Of a sample, the simulated collectives are those
of the signature. Finished parts are kept (kept.py), so an interrupted benchmark continues.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row
from benchmarks.kept import kept
from distbench.judge.communication_signature import counted
from distbench.launch import Request, jobs_of
from distbench.processes import ask_child
from distbench.simulate.allocator import replay_memory
from distbench.simulate.recording import RecordedSteps, record_steps
from distbench.spec import find

IS_LONG = True
FILE = Path(__file__).parent / "hf_families.py"
# A sentence has the place in a file, or the cause, and what to do.
REFUSAL = re.compile(r"\.py:\d+\)|; give |; use |; leave |; the likely cause: ")
PARTS = ("check", "run", "trace", "simulate", "around")
LEAST = -40.0
CLAIMS = (
    Claim(
        "44 Hugging Face families, default config, FSDP2: right, or one sentence with cause and fix, in `check`; "
        "`run`; its traces; `simulate`; `tune --around-my-plan`",
        "{:.0f}; {:.0f}; {:.0f}; {:.0f}; {:.0f}",
        "at least 40 each",
        tuple(f"families: {part}" for part in PARTS),
    ),
)


def simulated(name: str, mesh: dict[str, int] | None = None) -> RecordedSteps:
    """Recordings of rank 0 of each variant of a scenario in the file, and reasons."""
    jobs = jobs_of(
        Request((f"{FILE}::{name}",), (), mesh, "cpu", started_at=time.time(), full_mesh=True, shapes_only=True), None
    )
    return record_steps(jobs)[0]


def printed(*words: str) -> tuple[str, str]:
    """Standard output of a distbench command, and its sentence: empty where it succeeded."""
    done = subprocess.run([sys.executable, "-m", "distbench", *words], capture_output=True, text=True, check=False)
    error = "" if done.returncode in (0, 1) else done.stderr.strip() or f"exit code {done.returncode}"
    return done.stdout, error


def checked() -> dict[str, str]:
    """Family to the problems that `check` lists, empty where it lists none."""
    output, error = printed("check", f"{FILE}::family", "--json")
    scenarios = json.loads(output) if output.startswith("[") else []
    variants = [variant for entry in scenarios for variant in entry["variants"]]
    return {family_in(variant["label"]): "; ".join(variant["problems"]) for variant in variants} or {"all": error}


def ran() -> dict[str, dict[str, str]]:
    """ "run" and "trace" to family to its sentence, from one launch on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("--mesh", "dp_shard=2", "--quick", "--passes", "1", "--trace-paths", "--results", folder)
        _, error = printed("run", f"{FILE}::family", *words)
        lines = [line for file in Path(folder).glob("*/*.jsonl") for line in file.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    runs = {family_in(one["case"]["id"]): one for one in records if one["type"] == "case"}
    traces = {family_in(one["case_id"]): traced(one) for one in records if one["type"] == "trace"}
    return {
        "run": {name: one.get("error") or "" for name, one in runs.items()} or {"all": error},
        "trace": {name: traces.get(name, "no trace") for name in runs},
    }


def traced(record: dict[str, Any]) -> str:
    """How many owners are unknown, and on accelerators how the profiler differs; empty where nothing does."""
    owner = record["columns"].index("owner_known")
    unknown = sum(not row[owner] for row in record["rows"])
    of_profiler = record.get("agreement", {}).get("differences", ())
    return "; ".join([*of_profiler, *([f"{unknown} owners are unknown"] if unknown else [])])


def changed(name: str) -> str:
    """The sentence of `tune --around-my-plan`, predicted for H100."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("--mesh", "dp_shard=2", "--hardware", "h100", "--around-my-plan", "--results", f"{folder}/sweep")
        return printed("tune", f"{FILE}::family", "--set", f"family={name}", *words, "--json")[1]


def family_in(label: str) -> str:
    """The family in the id or label of a case."""
    return label.rpartition("family=")[2]


def recorded_families() -> dict[str, Any]:
    """Collectives of each family under FSDP2 and under its own plan, reasons, and the sample's figures."""
    families, decoders, sample = simulated("family", {"dp_shard": 8}), simulated("decoder"), simulated("sample")
    jobs = jobs_of(Request((f"{FILE}::sample",), device="cpu", started_at=time.time()), None)
    (answer,) = ask_child("signatures", given=[job.to_record() for job in jobs], timeout_s=600, failure="no signature")
    signed = {label.rpartition("/")[2]: case for label, case in answer["cases"].items()}
    pairs = [(one, signed[one.head.variant]) for one in sample.recordings]
    counts = [counted([each._asdict() for each in one.collectives]) == counted(case["paths"]) for one, case in pairs]
    ratios = [replay_memory(one.events).live_bytes / case["peak_bytes"] for one, case in pairs]
    return {
        "fsdp": {family_in(one.head.variant): len(one.collectives) for one in families.recordings},
        "own plan": {family_in(one.head.variant): len(one.collectives) for one in decoders.recordings},
        "refused": {family_in(label): reason for label, reason in families.left_out.items()},
        "own plan refused": {family_in(label): reason for label, reason in decoders.left_out.items()},
        "other collectives": counts.count(False),
        "memory": max(abs(ratio - 1) for ratio in ratios),
    }


def of(part: str, measure: Callable[[], Any]) -> Any:
    """A part's plain data, kept."""
    return kept(f"families-{part}", measure, "benchmarks/hf_families.py")


def sentences() -> Iterator[tuple[str, dict[str, str]]]:
    """Each part, and its sentence of each family: empty where that is right."""
    names = [str(name) for name in find(f"{FILE}::family")[0].axes["family"]]
    steps, recorded = of("run", ran), of("simulate", recorded_families)
    by_part = {"check": of("check", checked), **steps}
    by_part["simulate"] = {name: recorded["refused"].get(name, "") for name in names}
    by_part["around"] = {name: of(f"around-{name}", partial(changed, name)) for name in names}
    for part in PARTS:
        missing = by_part[part].get("all", "no answer")
        yield part, {name: by_part[part].get(name, missing) for name in names}


def is_one_sentence(text: str) -> bool:
    """Whether a reason is one line with a place or a cause, and what to do."""
    return "\n" not in text and "Traceback" not in text and bool(REFUSAL.search(text))


def main() -> list[Row]:
    """Rows (name, measured, allowed); prints a line per family."""
    by_part, recorded = dict(sentences()), of("simulate", recorded_families)
    print(f"{'family':16} {'check':>8} {'run':>8} {'trace':>8} {'simulate':>9} {'own plan':>9} {'around-my-plan':>15}")
    for name in by_part["check"]:
        words = {
            part: "ok" if not of_part[name] else "sentence" if is_one_sentence(of_part[name]) else "FAIL"
            for part, of_part in by_part.items()
        }
        own = recorded["own plan"].get(name, "-")
        line = f"{name:16} {words['check']:>8} {words['run']:>8} {words['trace']:>8} {words['simulate']:>9}"
        print(f"{line} {own:>9} {words['around']:>15}")
    reasons = {f"{part} {name}": text for part, each in by_part.items() for name, text in each.items() if text}
    for name, text in {**reasons, **recorded["own plan refused"]}.items():
        print(f"{name}: {text}")
    good = {part: sum(not text or is_one_sentence(text) for text in each.values()) for part, each in by_part.items()}
    own_reasons = recorded["own plan refused"].values()
    return [
        *((f"families: {part}", float(count), LEAST) for part, count in good.items()),
        ("families wrong with their cause", float(sum(map(bool, by_part["run"].values()))), math.inf),
        ("own plans refused without a way out", float(sum(not REFUSAL.search(why) for why in own_reasons)), 0.0),
        ("simulations with other collectives than the signature", float(recorded["other collectives"]), 0.0),
        ("largest distance of live memory from the signature's, %", 100 * recorded["memory"], math.inf),
    ]


if __name__ == "__main__":
    for row in main():
        print(row)
