"""torch's own planners, asked in one process of its own, so that nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distbench.advise.question import Setting
from distbench.ask_child import ask_child
from distbench.planning import State
from distbench.spec.errors import UserError

BUDGET_S = 20.0
START_S = 120.0
TORCH_PLANNERS = ("greedy", "min_cost")


@dataclass(frozen=True)
class TorchPath:
    """One planner's answer for one pair.

    Args:
        path: in torch's own notation; None where there is none.
        reason: why there is none.
    """

    path: str | None
    reason: str = ""


@dataclass(frozen=True)
class TorchAnswers:
    """What torch said of some pairs.

    Args:
        torch: its version; None if it could not be asked.
        paths: planner to one answer a pair.
    """

    torch: str | None
    paths: dict[str, tuple[TorchPath, ...]]


def ask_torch(setting: Setting, pairs: Sequence[tuple[State, State]], budget_s: float = BUDGET_S) -> TorchAnswers:
    """Each pair's path by torch's greedy and min_cost planners. Never raises: where torch fails, the answers say so.

    Args:
        setting: the tensor and its mesh.
        pairs: source and target layouts.
        budget_s: seconds of planning after which pairs are left out.
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
        return _unanswered(str(error), len(pairs))
    if "unsupported" in record:
        return _unanswered(record["unsupported"], len(pairs))
    paths = {name: tuple(_path(answer) for answer in found) for name, found in record["paths"].items()}
    return TorchAnswers(record["torch"], paths)


def _path(answer: dict[str, str] | None) -> TorchPath:
    if answer is None:
        return TorchPath(None, "not asked: time was up")
    return TorchPath(answer.get("path"), answer.get("error", ""))


def _unanswered(reason: str, num_pairs: int) -> TorchAnswers:
    return TorchAnswers(None, dict.fromkeys(TORCH_PLANNERS, (TorchPath(None, reason),) * num_pairs))
