"""`distbench --help`: commands by what one wants to do, each with its whole sentence."""

import click

# A command that stands in no section is listed under OTHER with the first sentence of its help.
SECTIONS = {
    "Measure": {
        "run": "Measure scenarios: collectives, redistributions, training steps.",
        "ab": "Launch two git revisions in turn, until it shows which is slower.",
        "calibrate": "Measure this machine: a profile to plan by, and a hardware file.",
    },
    "Read": {
        "report": "Show measured runs: tables, a page, plots, traced paths.",
        "history": "Show cases over launches, and where their level changed.",
        "export": "Write runs in another tool's format.",
    },
    "Compare": {
        "compare": "Show two runs side by side, and what that can tell.",
        "gate": "Say whether a candidate is slower than a baseline, for CI.",
        "baseline": "Save, list and show stored baselines.",
    },
    "Plan": {
        "list": "List the shipped scenarios; with a name, tell one in full.",
        "check": "Say whether plans can work on a mesh of any size, without ranks.",
        "plan": "Show how each planner would redistribute a tensor, and the best.",
        "simulate": "Predict a step's time and memory on hardware that is not here.",
        "sweep": "Say which plan to use on so many devices, predicted or measured.",
        "signature": "Write what scenarios communicate, exactly, for git.",
    },
    "Machine": {
        "doctor": "Say what this machine can run, and which defaults hold here.",
        "clean": "Delete old runs, after asking.",
    },
}
OTHER = "More"


class WholeSentences(click.Group):
    """A group whose help gives each command's first sentence, however long."""

    def sections(self) -> dict[str, dict[str, str]]:
        """Heading to command to its sentence."""
        return {"Commands": {name: first_sentence(command) for name, command in self.commands.items()}}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections; sentences that are too long for a line are wrapped."""
        sections = self.sections()
        # One width for all, so that sentences stand below each other.
        width = max((len(name) for commands in sections.values() for name in commands), default=0)
        for heading, commands in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), sentence) for name, sentence in commands.items()])


class Sections(WholeSentences):
    """The command line's own group."""

    def sections(self) -> dict[str, dict[str, str]]:
        """SECTIONS, without what is not there, and with what they lack."""
        known = {name for commands in SECTIONS.values() for name in commands}
        found = {
            heading: {name: sentence for name, sentence in commands.items() if name in self.commands}
            for heading, commands in SECTIONS.items()
        }
        more = {name: first_sentence(self.commands[name]) for name in self.commands if name not in known}
        return {heading: commands for heading, commands in (*found.items(), (OTHER, more)) if commands}


def first_sentence(command: click.Command) -> str:
    """The first sentence of a command's help."""
    words = " ".join((command.help or "").partition("\n\n")[0].split())
    return words.partition(". ")[0].rstrip(".") + "."
