"""Launches of unchanged code, one after the other, for the gate to be tried on."""

from collections.abc import Callable, Sequence
from pathlib import Path

from distbench.ab.side import Side
from distbench.ab.turns import launch_once


def rehearse(run_arguments: Sequence[str], num_launches: int, out: Path, say: Callable[[str], None]) -> Path:
    """Launch the working tree so many times; the folder of the run files.

    Args:
        run_arguments: of `distbench run`: scenarios and options.
        num_launches: how often.
        out: a new folder.
        say: shows a line to a person.

    Raises:
        UserError: a launch could not work, or `out` cannot be written.
        KeyboardInterrupt: the user stopped it; finished launches stay in `out`.
    """
    side = Side("unchanged", ".", Path.cwd())
    for number in range(1, num_launches + 1):
        took_s = launch_once(side, run_arguments, out)
        say(f"launch {number} of {num_launches}: {took_s:.1f} s")
    return out / side.name
