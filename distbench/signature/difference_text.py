"""What the exact gate found, as a person reads it and as CI does. The worst first."""

import json
from collections.abc import Callable
from dataclasses import asdict

from distbench.render.blocks import code_span, markdown_text
from distbench.render.ci import TOOL, CiOutcome, annotation, annotations, junit_xml
from distbench.render.screen import width_here
from distbench.render.terminal import wrap
from distbench.signature.exact_gate import Compared
from distbench.spec.printable import count_text, printable

MAX_SENTENCES = 2000  # in Markdown: a GitHub step summary holds 1 MiB


def text(found: Compared) -> str:
    """For a terminal."""
    lines = []
    for name, sentences in found.changed.items():
        count = count_text(len(sentences), "difference")
        lines += [f"{name}: {count}", *(f"  {sentence}" for sentence in sentences)]
    lines += [*found.uncompared, *found.shown, found.headline]
    return printable("\n".join(part for line in lines for part in wrap(line, width_here(), "    ")))


def markdown(found: Compared) -> str:
    """For a step summary: a heading with the verdict, then a list a file."""
    lines, room = [f"# exact gate: {found.headline}"], MAX_SENTENCES
    for name, sentences in found.changed.items():
        lines += [
            "",
            f"**{markdown_text(name)}**",
            "",
            *(f"- {code_span(sentence)}" for sentence in sentences[:room]),
        ]
        room = max(room - len(sentences), 0)
    num_sentences = sum(map(len, found.changed.values()))
    if num_sentences > MAX_SENTENCES:
        lines += ["", f"... {num_sentences - MAX_SENTENCES} more: {TOOL} --signature --format json"]
    notes = [f"- {markdown_text(sentence)}" for sentence in (*found.uncompared, *found.shown)]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


def json_text(found: Compared) -> str:
    """Everything that was found, as JSON."""
    return json.dumps({"exit_code": found.exit_code, "headline": found.headline, **asdict(found)}, indent=1)


def junit_text(found: Compared) -> str:
    """JUnit XML: a test case a file; one that changed is a failure, one that could not be compared an error."""
    outcomes = [CiOutcome("signatures", name, "\n".join(texts), "failure") for name, texts in found.changed.items()]
    outcomes += [CiOutcome("signatures", one.partition(":")[0], one, "error") for one in found.uncompared]
    outcomes += [CiOutcome("signatures", name, "as in the baseline") for name in found.same]
    if not found.num_paths:
        outcomes.append(CiOutcome("signatures", "something was compared", found.headline, "error"))
    return junit_xml(outcomes)


def github(found: Compared) -> str:
    """GitHub's annotations: an error for each difference and each file that could not be compared."""
    errors = [(name, sentence) for name, sentences in found.changed.items() for sentence in sentences]
    errors += [("not compared", sentence) for sentence in found.uncompared]
    lines = annotations({"error": errors})
    return "\n".join(lines if found.num_paths else [annotation("error", TOOL, found.headline), *lines])


# As `--format` names them; the timing gate has the same in gate/machine_forms.py.
FORMS: dict[str, Callable[[Compared], str]] = {
    **{"table": text, "markdown": markdown},
    **{"json": json_text, "junit": junit_text, "github": github},
}
