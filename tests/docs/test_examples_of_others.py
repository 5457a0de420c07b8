"""Examples of existing models: what each takes, and what it communicates, on a fake group in one child each."""

import importlib.util
import re
from collections import Counter

import pytest
from conftest import ROOT
from processes import Children

from benchmarks.bench_models import FILES, MAX_GLUE, glue_of
from distbench.spec import find
from distbench.spec.versions import installed_torch, release

EXAMPLES = ROOT / "docs" / "examples"
PAGES = [ROOT / "docs" / name for name in ("existing-code.md", "training-step.md", "transformers.md", "inference.md")]
ROW = re.compile(r"(\d+) x (\w+) (\w+) (\w+) over (\S+) \(\d+\), \w+, \d+ B: (\S+)")


def installed(file: str) -> None:
    """Skip where what a file imports is not installed; importing it here would take seconds."""
    package = FILES.get(file, file.partition("_")[0])
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_each_example_stands_on_a_page_and_takes_fewer_than_five_lines_of_glue() -> None:
    page = "".join(page.read_text() for page in PAGES)
    for name in FILES:
        assert f'--8<-- "docs/examples/{name}"' in page
        for entry in find(str(EXAMPLES / name)):
            assert 0 < glue_of(entry.file, entry.name) <= MAX_GLUE < 5


def signed_one(children: Children, file: str, scenario: str) -> Counter[str]:
    """What the only variant of a scenario communicates."""
    (rows,) = (rows for name, rows in signed(children, file, scenario).items() if name)
    return rows


def signed(children: Children, file: str, scenario: str = "") -> dict[str, Counter[str]]:
    """Variant to what it communicates: "phase kind mesh dim" to how often; each with an owner."""
    installed(file)
    done = children.cli("signature", f"{EXAMPLES / file}::{scenario or file.partition('.')[0]}", timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Counter[str]] = {}
    rows = result.setdefault("", Counter())
    for line in done.stdout.splitlines():
        if row := ROW.match(line):
            count, phase, _, kind, mesh_dim, owner = row.groups()
            assert owner != "(unknown)", line
            rows[f"{phase} {kind} {mesh_dim}"] += int(count)
        elif "step/" in line:
            rows = result.setdefault(line.strip("[]: ").rpartition("/")[2], Counter())
    return result


@pytest.mark.long
def test_models_of_transformers_communicate_what_their_plans_say(children: Children) -> None:
    """Two layers, each with two sums; the embedding, sharded by rows, is one more, and the ViT's is not sharded."""
    result = signed(children, "hf.py")
    for model in ("llama", "qwen3", "mixtral", "gemma", "vit"):
        rows = result[f"model={model}"]
        assert rows["forward all_reduce tp"] == (4 if model == "vit" else 5), model
        # The two units and the root, and of the ViT the embedding as well; all but the root again in backward.
        assert rows["forward all_gather dp_shard"] == (4 if model == "vit" else 3), model
    # The norms of queries and keys, of each layer, whose gradients are summed over heads.
    assert result["model=qwen3"]["backward all_reduce tp"] - result["model=llama"]["backward all_reduce tp"] == 4


def test_torchtitans_llama3_communicates_over_both_mesh_dims_of_its_own(children: Children) -> None:
    (rows,) = (rows for name, rows in signed(children, "torchtitan_llama3.py").items() if name)
    assert rows["forward all_gather dp_shard"] >= 3 and rows["forward reduce_scatter tp"] >= 4


@pytest.mark.skipif(release(installed_torch()) < (2, 14), reason="FSDP2 accepts spmd_types since torch 2.14")
def test_torchtitans_default_backend_communicates_over_both_mesh_dims(children: Children) -> None:
    rows = signed_one(children, "torchtitan_spmd_types.py", "torchtitan_spmd_types")
    assert rows["forward all_gather dp_shard"] >= 3 and rows["forward reduce_scatter tp"] >= 4


def test_steps_of_ones_own_communicate_by_phase_and_model(children: Children) -> None:
    """Clipping sums norms between backward and optimizer; each half of the GAN is gathered for its own name."""
    clipped = signed_one(children, "own_step.py", "clip_ema")
    assert clipped["forward all_gather dp_shard"] == 3 and clipped["other all_reduce dp_shard"] == 2
    gan = signed_one(children, "own_step.py", "gan")
    assert (gan["forward all_gather dp_shard"], gan["backward reduce_scatter dp_shard"]) == (3, 2)
    once = signed_one(children, "own_step.py", "accumulation")  # of two calls
    assert once["forward all_gather dp_shard"] == 6


def test_a_lightning_module_communicates_as_its_plan_says(children: Children) -> None:
    rows = signed_one(children, "lightning_module.py", "lightning_module")
    assert rows == Counter({"forward all_gather dp_shard": 1, "backward reduce_scatter dp_shard": 1})


def test_an_accelerate_loop_communicates_in_each_of_its_two_calls(children: Children) -> None:
    rows = signed_one(children, "accelerate_step.py", "accelerate_step")
    kinds = ("forward all_gather dp_shard", "backward reduce_scatter dp_shard", "other all_reduce dp_shard")
    assert rows == dict.fromkeys(kinds, 2)
