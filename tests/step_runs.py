"""A run of training steps with known slowdowns, in enough passes for verdicts."""

import json
from pathlib import Path

from conftest import ROOT

GOLDEN = ROOT / "tests" / "golden"
PASSES, FIRST_S = 10, 0.1


def steps(folder: Path, slowdowns: dict[str, float]) -> Path:
    """A run of steps with so many times the baseline's time in each of 10 passes."""
    header, case, *_ = (json.loads(line) for line in (GOLDEN / "steps.jsonl").read_text().splitlines())
    lines = [header]
    for name, slowdown in {"plain": 1.0, **slowdowns}.items():
        params = {**case["case"]["params"], "variant": name}
        samples = [FIRST_S * slowdown * (1 + 0.001 * number) for number in range(PASSES)]
        case_id = f"step/f32[10,100]/toy/{name}"
        lines.append({**case, "case": {**case["case"], "id": case_id, "params": params}, "samples_s": samples[:1]})
        lines += [
            {"type": "pass", "case_id": case_id, "number": number, "samples_s": [samples[number]], "phases_s": {}}
            for number in range(1, PASSES)
        ]
    lines.append({"type": "footer", "status": "complete", "finished_at": 2e9, "wall_s": 1.0, "message": ""})
    path = folder / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
