"""What a shell completes that click does not know of: names of scenarios."""

import click
from click.shell_completion import CompletionItem


def scenario_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shipped scenarios that begin so, each with its line; files where none does, for those of one's own."""
    from distbench.spec import list_entries

    found = [entry for entry in list_entries() if entry.name.startswith(incomplete)]
    items = [CompletionItem(entry.name, help=entry.summary) for entry in found]
    return items or [CompletionItem(incomplete, type="file")]
