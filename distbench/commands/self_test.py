"""`distbench gate --self-test`: the gate tried on launches of unchanged code, recorded or made now."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distbench.commands.files import new_folder
from distbench.commands.say import say
from distbench.spec.errors import UserError

if TYPE_CHECKING:
    from distbench.compare.options import Options

DEFAULT_RUN = ("collectives", "--quick", "--passes", "8")
NUM_PAIRS = (5, 10)
NUM_COMPARISONS = 200
SEED = 20260101


def self_test(paths: Sequence[str], num_launches: int, options: "Options") -> None:
    """Print the gate's rates of false alarms and of slowdowns found, on this machine.

    The paths are a folder of run files of unchanged code; or what `distbench run` is given, to launch it now.
    """
    from distbench.ab.turns import check_run_arguments, launch_unchanged
    from distbench.gate.quality.rates_text import OURS, table
    from distbench.gate.quality.recorded_launches import recorded
    from distbench.gate.quality.trial import QualityTrial, gate_rule

    least = 2 * min(NUM_PAIRS)
    if num_launches < least:
        raise UserError(f"--launches {num_launches} are too few: {min(NUM_PAIRS)} pairs take {least}")
    if len(paths) == 1 and Path(paths[0]).is_dir():
        folder = Path(paths[0])
    else:
        check_run_arguments(paths)
        out = new_folder("self-test")
        folder = launch_unchanged(paths or DEFAULT_RUN, num_launches, out, lambda line: say(line, err=True))
    trial, rules = QualityTrial(recorded(folder)), {OURS: partial(gate_rule, options=options)}
    click.echo(
        f"Unchanged code in {folder}, taken as ab would have launched it, a coin for the order of each pair.\n"
        "A slowdown is put into the samples of one case at a time; tail: one sample in ten takes three times as long.\n"
        "In percent of comparisons."
    )
    for num_pairs in NUM_PAIRS:
        if trial.num_starts(num_pairs):
            click.echo("\n" + table(trial, num_pairs, NUM_COMPARISONS, SEED, rules))
    if trial.series.num_launches < 2 * max(NUM_PAIRS):
        most = max(NUM_PAIRS)
        click.echo(f"\n{most} pairs take {2 * most} launches; there are {trial.series.num_launches}.")
