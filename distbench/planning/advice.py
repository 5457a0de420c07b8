"""Which redistribution planner to use for a tensor on a mesh: what `distbench plan` works out, says and draws.

`question`, `torch_paths`, `plans`, `pairs` and `drawing` are the analysis, and neither print nor draw;
`advice_text`, `recommendation`, `tensor_blocks` and `picture` render it. Only the two functions here combine them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distbench.planning.advice_text import pair_json, pair_text, ranking_json, ranking_text
from distbench.planning.layout_drawing import MAX_TEXT_RANKS, diagram_of, drawing_of
from distbench.planning.layout_picture import check_picture, save_picture
from distbench.planning.plan_request import Setting, ask_torch, every_pair, pair_of, zero_filled
from distbench.planning.priced_plans import advise, chosen_pairs, ranking_of
from distbench.show.terminal import width_here, wrap
from distbench.spec.errors import UserError


def plan_pair(setting: Setting, source: str, target: str, form: str, picture: Path | None = None) -> str:
    """One pair's plans, its layouts as torch writes them; `form` is "table" or "json", `picture` a .png or .svg file.

    Raises:
        UserError: a layout that is none, or that this torch does not redistribute to; a picture that cannot be written.
    """
    pair = pair_of(source, target, setting)
    if picture:
        check_picture(picture)
    torch = ask_torch(setting, [pair])
    if torch.no_zero_fill and zero_filled(*pair):
        raise UserError(f"{source} -> {target}: {torch.no_zero_fill}; write R or S(dim) where the source has a shard")
    advice = advise(setting, *pair, torch)
    drawn = wrap(save_picture(setting, advice, picture), width_here(), "  ") if picture else []
    if form == "json":
        return pair_json(setting, advice, torch)
    drawing = drawing_of(setting, advice.use, MAX_TEXT_RANKS)
    diagram = drawing if isinstance(drawing, str) else diagram_of(drawing)
    return "\n\n".join([pair_text(setting, advice, torch, diagram), *(["\n".join(drawn)] if drawn else [])])


def plan_all_pairs(setting: Setting, form: str, told: Callable[[dict[str, Any]], None] = lambda event: None) -> str:
    """Every ordered pair of layouts; `form` is "table" or "json". `told` gets events as `records/progress.py` lists
    them, a case a pair.
    """
    every = list(every_pair(setting))
    pairs = chosen_pairs(setting, every)
    told({"event": "case", "id": "plan/paths of torch's planners"})
    torch = ask_torch(setting, pairs)
    told({"event": "plan", "num_cases": len(pairs)})
    told({"event": "case", "id": "plan/prices of all planners"})
    ranking = ranking_of(setting, pairs, torch, len(every), lambda: told({"event": "done", "id": "", "status": "ok"}))
    return (ranking_json if form == "json" else ranking_text)(setting, ranking, torch)
