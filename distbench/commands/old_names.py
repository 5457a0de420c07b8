"""Options under names that they had before: they work, stand in no help, and say in one line what to write instead."""

from collections.abc import Sequence

from distbench.commands.say import say

# Command to an option's old name, and the words that mean the same now; a value follows as it did.
OLD_NAMES: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("ab",): {"--budget": ("--max-time",)},
    ("baseline", "list"): {"--out": ("--runs",)},
    ("doctor",): {"--json": ("--format", "json")},
    ("list",): {"--json": ("--format", "json")},
    ("report",): {"--out": ("--runs",)},
    # An abbreviation of torchrun's --print-completion since torch 2.14.
    ("run",): {"--print": ("--dry-run",)},
}


def under_new_names(words: Sequence[str]) -> list[str]:
    """A command line's words, command first, with old names of options replaced and each one told of.

    What stands after `--` belongs to another command.
    """
    renamed = next((names for command, names in OLD_NAMES.items() if tuple(words[: len(command)]) == command), {})
    end = words.index("--") if "--" in words else len(words)
    found: list[str] = []
    for word in words[:end]:
        old, equals, value = word.partition("=")
        new = renamed.get(old, (old,))
        if old in renamed:
            say(f"distbench: {old} is called {' '.join(new)} now", err=True)
        found += [*new[:-1], f"{new[-1]}{equals}{value}"]
    return [*found, *words[end:]]
