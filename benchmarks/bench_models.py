"""Other people's models, as docs/existing-code.md has them: what each takes, whether it comes out right, what is seen.

Gloo ranks run the examples' steps: loss and gradients (of inference, the output) against one device, and their
collectives by two methods against the signature, which a child process finds on a fake group.
"""

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Row
from distbench.launch import Request, jobs_of
from distbench.processes import ask_child
from distbench.simulate.recording import record_steps
from distbench.spec import find
from distbench.spec.assumptions import Assumption

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
# File to what it needs.
FILES = {
    "own_parallelize.py": "torch",
    "own_experts.py": "torch",
    "own_pipeline.py": "torch",
    "own_step.py": "torch",
    "lightning_module.py": "lightning",
    "hf.py": "transformers",
    "hf_itself.py": "transformers",
    "hf_inference.py": "transformers",
    "torchtitan_llama3.py": "torchtitan",
}
# What must come out wrong, with its cause in the sentence.
NAMED = {"gpt2": "random numbers"}
# File to what its simulation must assume.
ASSUMED: dict[str, dict[str, Assumption]] = {"own_experts.py": {"layers.*": "uniform"}}
MAX_GLUE, LEAST_OWNED = 4, 97
CLAIMS = (
    Claim(
        "examples of existing models (transformers, torchtitan, own functions, experts, pipelines) that are `wrong`",
        "{:.0f}",
        "0",
        ("models called wrong",),
    ),
    Claim("lines of glue per example", "at most {:.0f}", "under 5", ("most glue",)),
    Claim("collectives of these examples that a path table lacks", "{:.0f}", "0", ("collectives missing",)),
)


def main() -> list[Row]:
    """Rows (name, measured, allowed); prints one line a model."""
    files = [str(EXAMPLES / name) for name, package in FILES.items() if importlib.util.find_spec(package)]
    for name, package in FILES.items():
        if not importlib.util.find_spec(package):
            print(f"left out: {name}, {package} is not installed")
    found = [row for file in files for row in on_ranks(file)]
    signed = {name: count for file in files for name, count in signatures(file).items()}
    in_simulation = {name: count for file in files for name, count in simulated(file).items()}
    counts = f"{'traced':>6} {'signed':>6} {'simulated':>9} {'owned':>6}"
    print(f"{'model':40} {'glue':>4} {'result':>6} {counts} {'error':>9} {'allowed':>8}")
    for row in found:
        row["glue"], row["signed"] = glue_of(Path(row["file"]), row["name"]), signed.get(row["name"], -1)
        row["simulated"] = in_simulation.get(row["name"], -1)
        print(line(row))
        for sentence in filter(None, [row["wrong"], *row["differences"]]):
            print(f"    {sentence}")
    owned = min(100 * row["num_owned"] / row["num_traced"] for row in found)
    missing = sum(abs(row["signed"] - row["num_traced"]) + len(row["differences"]) for row in found)
    return [
        ("models called wrong", float(sum(not is_ok(row) for row in found)), 0.0),
        ("most glue", float(max(row["glue"] for row in found)), float(MAX_GLUE)),
        ("collectives missing", float(missing), 0.0),
        ("examples not simulated", float(sum(row["simulated"] < 1 for row in found)), 0.0),
        ("least owned, %", owned, -float(LEAST_OWNED)),
        (
            "largest error over what is allowed",
            max(error_of(row) / row["tolerance"] for row in found if row["name"] not in NAMED),
            1.0,
        ),
    ]


def on_ranks(file: str) -> list[dict[str, Any]]:
    """What the ranks of one file's steps found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        num_ranks = max(math.prod(entry.mesh.values()) for entry in find(file))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        done = subprocess.run(
            [*command, "-m", "benchmarks.models_ranks", str(out), file], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"the ranks of {file} failed: {done.stderr[-2000:]}")
        return list(json.loads(out.read_text()))


def signatures(file: str) -> dict[str, int]:
    """Scenario and variant to the collectives of its signature, no rank started."""
    jobs = jobs_of(Request(targets=(file,), device="cpu", started_at=time.time()), None)
    answers = ask_child(
        "signatures",
        given=[job.to_record() for job in jobs],
        timeout_s=600,
        failure="no signature",
    )
    if failed := next((answer["user_error"] for answer in answers if "user_error" in answer), None):
        raise RuntimeError(f"{file} has no signature: {failed}")
    cases = [item for answer in answers for item in answer["cases"].items()]
    return {case_id.split("/", 2)[-1]: len(case["paths"]) for case_id, case in cases}


def simulated(file: str) -> dict[str, int]:
    """Scenario and variant to the collectives of its simulation."""
    jobs = jobs_of(Request((file,), device="cpu", started_at=time.time(), full_mesh=True, shapes_only=True), None)
    return {
        recording.head.label: len(recording.collectives)
        for steps in record_steps(jobs, assume=ASSUMED.get(Path(file).name))
        for recording in steps.recordings
        if not recording.head.rank
    }


def glue_of(file: Path, name: str) -> int:
    """Lines marked as glue, of a file's scenario and of what stands outside of all of them."""
    counts: dict[str, int] = {}
    at = ""
    for text in file.read_text().splitlines():
        if text.startswith("@") or (text and not text[0].isspace() and text[0] not in ")]}"):
            at = text.removeprefix("def ").partition("(")[0] if text.startswith("def ") else ""
        counts[at] = counts.get(at, 0) + ("# glue" in text)
    others = {entry.name for entry in find(str(file))} - {name.partition("/")[0]}
    return sum(count for at, count in counts.items() if at not in others)


def is_ok(row: dict[str, Any]) -> bool:
    """Right; or wrong, where it must be, for the reason that it must be."""
    cause = NAMED.get(row["name"])
    return row["wrong"] is None if cause is None else cause in (row["wrong"] or "")


def error_of(row: dict[str, Any]) -> float:
    """Relative error of the worst gradient, or of an inference's output."""
    return float(row["grad_rel_error"] if "grad_rel_error" in row else row["output_rel_error"])


def line(row: dict[str, Any]) -> str:
    """One model's line."""
    result = "named" if row["wrong"] and is_ok(row) else "ok" if is_ok(row) else "wrong"
    owned = f"{100 * row['num_owned'] / row['num_traced']:.0f} %"
    seen = f"{row['num_traced']:>6} {row['signed']:>6} {row['simulated']:>9} {owned:>6}"
    return f"{row['name']:40} {row['glue']:>4} {result:>6} {seen} {error_of(row):9.1e} {row['tolerance']:8.0e}"


if __name__ == "__main__":
    for row in main():
        print(row)
