"""Families of transformers by their configs' defaults: which of them a step is simulated of, and a sample on ranks.

`hf_families.py` has them. The sample's collectives in the simulation are those of the signature, and its steps are
checked and traced on gloo ranks. Where dropout is a default, a step must be `wrong`, with that as its cause.
"""

import math
import re
import time
from pathlib import Path

from benchmarks.bench_models import error_of, on_ranks
from benchmarks.claims import Claim, Row
from distbench.judge.communication_signature import counted
from distbench.launch import Request, jobs_of
from distbench.processes import ask_child
from distbench.simulate.allocator import replay_memory
from distbench.simulate.recording import RecordedSteps, record_steps

IS_LONG = True
FILE = Path(__file__).parent / "hf_families.py"
# A refusal has the place in a file and what to do.
REFUSAL = re.compile(r"\.py:\d+\)|; give |; use |; leave ")
CLAIMS = (
    Claim(
        "simulated Hugging Face families of 44 (default config, FSDP2 over 8 ranks)",
        "{:.0f}",
        "at least 40",
        ("families simulated",),
    ),
)


def simulated(name: str, mesh: dict[str, int] | None = None) -> RecordedSteps:
    """Recordings of rank 0 of each variant of a scenario in the file, and reasons."""
    jobs = jobs_of(
        Request((f"{FILE}::{name}",), (), mesh, "cpu", started_at=time.time(), full_mesh=True, shapes_only=True), None
    )
    return record_steps(jobs)[0]


def main() -> list[Row]:
    """Rows (name, measured, allowed); prints a line per family."""
    families, decoders, sample = simulated("family", {"dp_shard": 8}), simulated("decoder"), simulated("sample")
    print(f"{'family':24} {'FSDP':>10} {'TP + FSDP':>10}")
    with_plan = {one.head.variant: f"{len(one.collectives)}" for one in decoders.recordings}
    for one in families.recordings:
        name, own = one.head.variant.removeprefix("family="), with_plan.get(one.head.variant, "no plan")
        print(f"{name:24} {len(one.collectives):10} {own:>10}")
    refused = {**families.left_out, **decoders.left_out}
    for label, reason in refused.items():
        print(f"{label}: {reason}")
    jobs = jobs_of(Request((f"{FILE}::sample",), device="cpu", started_at=time.time()), None)
    (answer,) = ask_child("signatures", given=[job.to_record() for job in jobs], timeout_s=600, failure="no signature")
    signed = {label.rpartition("/")[2]: case for label, case in answer["cases"].items()}
    num_other, apart = 0, 0.0
    for one in sample.recordings:
        paths, case = counted([collective._asdict() for collective in one.collectives]), signed[one.head.variant]
        num_other += paths != counted(case["paths"])
        ratio = replay_memory(one.events).live_bytes / case["peak_bytes"]
        apart = max(apart, abs(ratio - 1))
        print(f"{one.head.variant:24} {paths.total():>4} collectives simulated, {ratio:.3f} of the signature's peak")
    ran = on_ranks(f"{FILE}::sample")
    for row in ran:
        print(f"{row['name']:32} {row['num_traced']:>4} traced, error {error_of(row):.1e}, {row['wrong'] or 'ok'}")
    wrong = sum(row["wrong"] is not None and "random numbers" not in row["wrong"] for row in ran)
    return [
        ("families simulated", float(len(families.recordings)), -40.0),
        ("refusals without a place or a way out", float(sum(not REFUSAL.search(why) for why in refused.values())), 0.0),
        ("simulations with other collectives than the signature", float(num_other), 0.0),
        ("largest distance of live memory from the signature's, %", 100 * apart, math.inf),
        ("families called wrong on ranks", float(wrong), 0.0),
        ("collectives missing in a trace", float(sum(len(row["differences"]) for row in ran)), 0.0),
    ]


if __name__ == "__main__":
    for row in main():
        print(row)
