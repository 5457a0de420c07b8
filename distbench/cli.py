"""Arguments to calls, `UserError` to a message and an exit code; nothing else happens here.

Imports stand inside the commands: `--help` and `list` must not pay for what they do not use.
"""

import sys
from typing import Any

import click

from distbench import __version__
from distbench.commands.ab import ab
from distbench.commands.baseline import baseline
from distbench.commands.calibrate import calibrate
from distbench.commands.check import check
from distbench.commands.export import export
from distbench.commands.gate import gate
from distbench.commands.history import history
from distbench.commands.plan import plan
from distbench.commands.report import report
from distbench.commands.run import run
from distbench.commands.say import say, say_lines
from distbench.commands.scenario_table import scenario_table
from distbench.commands.signature import signature
from distbench.commands.width import width_option
from distbench.spec.errors import UserError
from distbench.spec.printable import cut
from distbench.spec.signals import stopped_as_interrupt


class Commands(click.Group):
    """Turns the one error a user can fix into its message and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            with stopped_as_interrupt():
                return super().invoke(ctx)
        except UserError as error:
            say(f"distbench: {cut(str(error))}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            say("distbench: interrupted", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            # click would end with 1, which is the gate's word for a regression.
            ctx.exit(141)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="distbench")
def main() -> None:
    """Benchmark distributed PyTorch: what a parallelism plan costs on this hardware, and which part of it costs that.

    \b
    Example:
      distbench run llama_2d --quick
      distbench report
    """


@main.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a scenario.")
@width_option
def list_command(as_json: bool) -> None:
    """List the shipped scenarios: mesh, tags and what each measures.

    \b
    Example:
      distbench list --json
    """
    from distbench.spec import list_entries

    entries = list_entries()
    if as_json:
        fields = ("name", "mesh", "tags", "axes", "params", "summary")
        _print_json([{name: getattr(entry, name) for name in fields} | {"file": str(entry.file)} for entry in entries])
        return
    say(scenario_table(entries))


def _print_json(value: Any) -> None:
    import json

    click.echo(json.dumps(value, indent=1))


@main.command()
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO...]")
@click.option("--paths", is_flag=True, help="Have two methods watch each scenario's step, and compare what they see.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@width_option
def doctor(scenarios: tuple[str, ...], paths: bool, as_json: bool) -> None:
    """Say what this machine can run: devices, backends, torch, and each torch internal that distbench leans on.

    With --paths, check instead what run --trace-paths relies on, for the SCENARIOs or all shipped ones.

    \b
    Examples:
      distbench doctor
      distbench doctor --paths llama_2d
    """
    from distbench.doctor import agreement, examine, lines_of, lines_of_agreement

    if scenarios and not paths:
        raise UserError(f"doctor looks at scenarios with --paths only: distbench doctor --paths {' '.join(scenarios)}")
    found = agreement(scenarios) if paths else examine()
    if as_json:
        _print_json(found)
    else:
        say_lines(lines_of_agreement(found) if paths else lines_of(found), " " * 8)
    sys.exit(0 if found["usable"] else 1)


for _command in (run, report, calibrate, plan, check, signature, gate, baseline, export, ab, history):
    main.add_command(_command)
