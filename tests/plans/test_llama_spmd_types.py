"""One model by DTensor and by spmd_types: the same communication, and a reason where the package is missing."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import Children

from distbench.plans import training_step
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.spec import Scenario
from distbench.torch_private import Skipped


@pytest.mark.skipif(not find_spec("spmd_types"), reason="spmd_types is not installed; pip install spmd_types")
@pytest.mark.long
def test_both_ways_communicate_the_same(children: Children, tmp_path: Path) -> None:
    file = tmp_path / "both.signature"
    children.python("-m", "distbench", "signature", "write", "llama_spmd_types", "--quick", "-o", file, check=True)
    by_dtensor, by_spmd_types = (
        [line.partition(", explicit")[0] for line in part.splitlines()[2:] if line.strip()]
        for part in re.split(r"^\[step", file.read_text(), flags=re.MULTILINE)[1:]
    )
    assert len(by_dtensor) > 15 and by_spmd_types == by_dtensor


def test_a_missing_package_skips_the_step_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "find_spec", lambda name: None)
    scenario = Scenario(build_model=lambda: None, make_batch=lambda: None, needs=("spmd_types",))
    with pytest.raises(Skipped, match="spmd_types is not installed; run pip install spmd_types"):
        TrainingStep(scenario, RankContext.__new__(RankContext))
