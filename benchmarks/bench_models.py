"""Other people's models, as docs/existing-code.md has them: what each takes, whether it comes out right, what is seen.

Gloo ranks run the examples' steps: loss and gradients (of inference, the output) against one device, and their
collectives by two methods against the signature, which a child process finds on a fake group. After them one table has
what earlier versions made of these models, and the figures of other benchmarks on real models and steps: families,
optimizers, recipes. `quick` is the examples alone.
"""

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import bench_families, bench_recipes, bench_right_optimizers
from benchmarks.claims import Claim, Row
from benchmarks.kept import kept
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
    "accelerate_step.py": "accelerate",
    "hf.py": "transformers",
    "hf_itself.py": "transformers",
    "hf_inference.py": "transformers",
    "torchtitan_llama3.py": "torchtitan",
}
BY_HAND = Path(__file__).parent / "models_by_hand.py"
# A model or step form that once was refused or wrong, or took much glue, and the examples that have it today.
ONCE = {
    "HF Llama, its config's own plan strings": ("hf/model=llama",),
    "HF Llama, a plan of names by hand, loss of .logits": ("by_hand",),
    "HF Llama with labels, an object with .loss": ("hf/model=llama",),
    "transformers' own tensor parallelism (Llama, Qwen3)": ("hf_itself/model=llama", "hf_itself/model=qwen3"),
    "own parallelize(model, mesh) that does everything": ("own_parallelize",),
    "GPT-2, FSDP2, dropout 0.1": ("gpt2",),
    "HF ViT, TP and FSDP2": ("hf/model=vit",),
    "torchtitan llama3, its own parallelize_llama": ("torchtitan_llama3",),
    "dict batch; tuple of three tensors, no target": ("dict_batch", "tuple_batch"),
    "MoE, own all-to-alls: FSDP2 by distbench; own": ("experts_left_alone", "own_experts"),
    "DDP: DdpPlan": ("averaged_in_buckets",),
    "pipeline: 1F1B, interleaved": ("own_pipeline/schedule=1f1b", "own_pipeline/schedule=interleaved_1f1b"),
}
# Lines of glue that a step of one's own may take.
STEPS = {
    "clip, scaler, schedule, EMA": ("own_step.py", "clip_ema", 8),
    "a GAN with two optimizers": ("own_step.py", "gan", 12),
    "a LightningModule": ("lightning_module.py", "lightning_module", 3),
}
IS_LONG = True
MEASURED = ("docs/examples", "benchmarks/models_by_hand.py")
# What must come out wrong, with its cause in the sentence.
NAMED = {"gpt2": "random numbers"}
# File to what its simulation must assume.
ASSUMED: dict[str, dict[str, Assumption]] = {"own_experts.py": {"layers.*": "uniform"}}
MAX_GLUE, LEAST_OWNED = 4, 97
CLAIMS = (
    Claim(
        "correct examples (transformers, torchtitan, own functions, experts, pipelines) reported as `wrong`",
        "{:.0f}",
        "0",
        ("models called wrong",),
    ),
    Claim("lines of glue per example", "at most {:.0f}", "under 5", ("most glue",)),
    Claim("collectives of these examples missing in path tables", "{:.0f}", "0", ("collectives missing",)),
)


def main() -> list[Row]:
    """Rows (name, measured, allowed); prints all tables."""
    rows = quick()
    others = [row for bench in (bench_families, bench_right_optimizers, bench_recipes) for row in bench.main()]
    print(f"\n{'real models and steps':76} {'measured':>9}  wanted")
    for name, measured, allowed in [*(row for row in rows if row[0].startswith("glue")), *others]:
        print(f"{name:76} {measured:9.2f}  {bound(allowed)}")
    return [*rows, *others]


def bound(allowed: float) -> str:
    """What a figure may be."""
    return "" if math.isinf(allowed) else f"at least {-allowed:g}" if allowed < 0 else f"at most {allowed:g}"


def quick() -> list[Row]:
    """Rows of the examples; prints one line a model, and one line a model of ONCE."""
    files = [str(EXAMPLES / name) for name, package in FILES.items() if importlib.util.find_spec(package)]
    files += [f"{BY_HAND}::by_hand"]
    for name, package in FILES.items():
        if not importlib.util.find_spec(package):
            print(f"left out: {name}, {package} is not installed")
    result = [row for file in files for row in kept(f"models-{Path(file).name}", partial(measured, file), *MEASURED)]
    counts = f"{'traced':>6} {'signed':>6} {'simulated':>9} {'owned':>6}"
    print(f"{'model':40} {'glue':>4} {'result':>6} {counts} {'error':>9} {'allowed':>8}")
    for row in result:
        row["glue"] = glue_of(Path(row["file"]), row["name"])
        print(line(row))
        for sentence in filter(None, [row["wrong"], *row["differences"]]):
            print(f"    {sentence}")
    print_once({row["name"]: row for row in result})
    sweeps = {
        name: sentence
        for file in files
        for name, sentence in kept(f"models-sweep-{Path(file).name}", partial(swept, file), *MEASURED).items()
    }
    for name, sentence in sweeps.items():
        print(f"tune {name}: {sentence or 'ranked'}")
    owned = min(100 * row["num_owned"] / row["num_traced"] for row in result)
    missing = sum(abs(row["signed"] - row["num_traced"]) + len(row["differences"]) for row in result)
    return [
        ("models called wrong", float(sum(not is_ok(row) for row in result)), 0.0),
        ("most glue", float(max(row["glue"] for row in result)), float(MAX_GLUE)),
        *(
            (f"glue: {step}", float(glue_of(EXAMPLES / file, name)), float(most))
            for step, (file, name, most) in STEPS.items()
        ),
        ("collectives missing", float(missing), 0.0),
        ("examples not simulated", float(sum(row["simulated"] < 1 for row in result)), 0.0),
        ("examples that tune does not rank", float(sum(map(bool, sweeps.values()))), 0.0),
        ("least owned, %", owned, -float(LEAST_OWNED)),
        (
            "largest error over what is allowed",
            max(error_of(row) / row["tolerance"] for row in result if row["name"] not in NAMED),
            1.0,
        ),
    ]


def print_once(result: dict[str, dict[str, Any]]) -> None:
    """Print glue and result of each row of ONCE, and the sentence on what is rejected."""
    print(f"\n{'model or step form':54} {'glue':>5}  result")
    for what, names in ONCE.items():
        rows = [result[name] for name in names if name in result]
        if not rows:
            print(f"{what:54} {'-':>5}  left out, see above")
            continue
        results = "; ".join(f"{result_of(row)} ({error_of(row):.1e})" for row in rows)
        print(f"{what:54} {'; '.join(str(row['glue']) for row in rows):>5}  {results}")
    [checked] = json.loads(bench_families.printed("check", f"{BY_HAND}::ddp_itself", "--json")[0])
    glue = glue_of(BY_HAND, "ddp_itself")
    problems = "; ".join(checked["variants"][0]["problems"])
    print(f"{'DDP: DistributedDataParallel(model)':54} {glue:>5}  {f'rejected: {problems}' if problems else 'ok'}")


def measured(file: str) -> list[dict[str, Any]]:
    """What the ranks of one file's steps found, with the collectives of the signature and of the simulation."""
    signed, in_simulation = signatures(file), simulated(file)
    about = {"signed": signed, "simulated": in_simulation}
    return [{**row, **{key: counts.get(row["name"], -1) for key, counts in about.items()}} for row in on_ranks(file)]


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


def swept(file: str) -> dict[str, str]:
    """Scenario to the sentence of `tune` on the scenario's number of H100; "" if ranked."""
    assumptions = [f"--assume={pattern}={value}" for pattern, value in ASSUMED.get(Path(file).name, {}).items()]
    answers = {}
    for entry in find(file):
        with tempfile.TemporaryDirectory() as folder:
            words = ("--world", str(math.prod(entry.mesh.values())), "--hardware", "h100", "--plans", "2", *assumptions)
            answers[entry.name] = bench_families.printed(
                *("tune", f"{entry.file}::{entry.name}", *words, "--results", f"{folder}/sweep", "--json")
            )[1]
    return answers


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


def result_of(row: dict[str, Any]) -> str:
    """`ok`, `named` (wrong with its cause, as it must be) or `wrong`."""
    return "wrong" if not is_ok(row) else "named" if row["wrong"] else "ok"


def line(row: dict[str, Any]) -> str:
    """One model's line."""
    owned = f"{100 * row['num_owned'] / row['num_traced']:.0f} %"
    seen = f"{row['num_traced']:>6} {row['signed']:>6} {row['simulated']:>9} {owned:>6}"
    return f"{row['name']:40} {row['glue']:>4} {result_of(row):>6} {seen} {error_of(row):9.1e} {row['tolerance']:8.0e}"


if __name__ == "__main__":
    for row in main():
        print(row)
