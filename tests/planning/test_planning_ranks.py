"""Calibrated plans and the direct executor on real gloo ranks; what is checked is in ranks/planning_checks.py."""

from pathlib import Path

import pytest
from conftest import ROOT
from processes import Ranks


@pytest.mark.parametrize(("world_size", "checks", "at_least"), [(4, "four_ranks", 900), (8, "eight_ranks", 250)])
@pytest.mark.long
def test_values_on_real_ranks(world_size: int, checks: str, at_least: int, ranks: Ranks, tmp_path: Path) -> None:
    done = ranks.run_forked(world_size, ROOT / "tests" / "ranks" / "planning_checks.py", checks, tmp_path / "checked")
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "checked").read_text()) >= at_least
