"""torch's own planners, asked in one process of its own, so that nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distbench.advise.question import Setting
from distbench.ask_child import ask_child
from distbench.planning import State
from distbench.spec.errors import UserError
from distbench.spec.planner_names import TORCH_PLANNERS

BUDGET_S = 20.0
START_S = 120.0


@dataclass(frozen=True)
class TorchPath:
    """One planner's answer for one pair: its path in torch's own notation, or None and the reason why."""

    path: str | None
    reason: str = ""


@dataclass(frozen=True)
class TorchAnswers:
    """torch's version, None if it could not be asked; and for each planner one answer a pair.

    `no_zero_fill` is why this torch makes no partial of a shard, None where it does or could not be asked.
    """

    torch: str | None
    paths: dict[str, tuple[TorchPath, ...]]
    no_zero_fill: str | None = None


def ask_torch(setting: Setting, pairs: Sequence[tuple[State, State]], budget_s: float = BUDGET_S) -> TorchAnswers:
    """Each pair's path by torch's own planners; after `budget_s` seconds of planning, pairs are left out.

    Never raises: where torch fails, the answers say so.
    """
    request = {
        "mesh_shape": setting.problem.mesh_shape,
        "shape": setting.problem.shape,
        "dtype": setting.dtype,
        "devices_per_host": setting.devices_per_host,
        "pairs": [[str(source), str(target)] for source, target in pairs],
        "budget_s": budget_s,
    }
    try:
        record: dict[str, Any] = ask_child(
            "distbench.worker.children.plan_paths",
            given=request,
            timeout_s=budget_s + START_S,
            failure="torch cannot be asked: {why}",
        )
    except UserError as error:
        record = {"unsupported": str(error)}
    if reason := record.get("unsupported"):
        return TorchAnswers(None, dict.fromkeys(TORCH_PLANNERS, (TorchPath(None, reason),) * len(pairs)))
    paths = {name: tuple(map(_path, found)) for name, found in record["paths"].items()}
    return TorchAnswers(record["torch"], paths, record["no_zero_fill"])


def _path(answer: dict[str, str] | None) -> TorchPath:
    if answer is None:
        return TorchPath(None, "not asked: time was up")
    return TorchPath(answer.get("path"), answer.get("error", ""))
