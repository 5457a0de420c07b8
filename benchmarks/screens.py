"""`./run.sh screens [--folder DIR] [NAME...]`: run what docs/screens.md shows, and draw it into docs/images/screens.

Commands run for real in a terminal of 80 or 120 columns; the page and the notebook are opened in headless Chromium.
Nothing in a picture is written by hand, but paths and the machine's name are replaced. It takes about two minutes; with
`--folder`, what was measured stays there, and pictures named alone are drawn from it again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.notebook_pages import notebook_page
from benchmarks.terminal_pictures import picture_of, screen_of, shot_of

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "images" / "screens"
# What is shown instead of this checkout, and of the folder that the commands run in.
CHECKOUT, WORK = "/home/me/distbench", "/home/me/work"
ROWS = {80: 24, 120: 40}
FIRST_RUNS = (
    "distbench run tp_mlp --quick --quiet --results before",
    "distbench run tp_mlp --quick --quiet --results after",
    "distbench run collectives --quick --quiet",
    "head -n 20 results/laptop/*.jsonl >interrupted.jsonl",
)


@dataclass(frozen=True)
class Screen:
    """One command, and what it prints.

    Args:
        name: the picture's file without its ending.
        command: as docs have it.
        columns: of each terminal that it is drawn in; the second one's file is NAME-COLUMNS.
        typed, stop_at: as `screen_of` takes them.
    """

    name: str
    command: str
    columns: Sequence[int] = (80,)
    typed: str = ""
    stop_at: str = ""

    def files(self) -> dict[int, str]:
        """The picture's file for each width of a terminal."""
        return {wide: f"{self.name}{f'-{wide}' * bool(at)}.svg" for at, wide in enumerate(self.columns)}


SCREENS = (
    Screen("help", "distbench --help"),
    Screen("list", "distbench list tp_mlp"),
    Screen("dry-run", 'distbench run fsdp_knobs -k "plain or hybrid" --dry-run'),
    Screen("progress", "distbench run redistribute --quick --results progress", stop_at=r"\b[1-4]\d\d/\d+ 0:"),
    Screen("summary", "distbench run llama_2d tp_mlp --quick --trace-paths --label try"),
    Screen("label", "distbench report --label try"),
    Screen("report", "distbench report tp_mlp", (80, 120)),
    Screen("paths", "distbench report llama_2d --paths"),
    Screen("resume", "distbench run --resume interrupted.jsonl"),
    Screen("compare", "distbench compare before after", (80, 120)),
    Screen("check", "distbench check llama_3d --mesh dp_shard=2,cp=2,tp=3"),
    Screen("mistake", "distbench run tp_mpl --mesh tp=2"),
    Screen("clean", "distbench clean --keep 1", typed="n\r"),
    Screen("completion", "distbench run tp_", typed="\t\t"),
)
# Name to (window's width and height, what is opened); the page is that of `distbench report --page`.
SHOTS = {
    "page": (1280, 1000, "page"),
    "page-phone": (390, 1000, "page"),
    "../report-page": (1280, 860, "page"),
    "notebook": (900, 1100, "notebook"),
}
# A timeline below its section's title, half of it shown, and the text of one bar.
SCRIPTS = {
    "../report-page": """(() => {
      const svg = document.querySelector('[data-zoom]');
      const figure = svg.closest('figure');
      svg.closest('details').scrollIntoView();
      figure.previousElementSibling.querySelector('button').click();
      const isInside = ({left, top}) => left > 700 && top > 560;
      show([...svg.querySelectorAll('.spot')].find(spot => isInside(spot.getBoundingClientRect())));
    })()"""
}


def main(arguments: Sequence[str]) -> int:
    """Draw the pictures named, or all; 2 for a name that is none."""
    parser = argparse.ArgumentParser(prog="./run.sh screens", description=__doc__)
    known = [*(screen.name for screen in SCREENS), *SHOTS]
    parser.add_argument("name", nargs="*", help=f"out of {', '.join(known)}")
    parser.add_argument("--folder", type=Path, help="where to measure; kept [a temporary one]")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.name if name not in known]:
        print(f"no picture {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temp:
        folder = (given.folder or Path(temp)).resolve()
        environment = _environment(folder, Path(temp))
        if not (folder / "before").exists():
            for command in FIRST_RUNS:
                subprocess.run(["bash", "-c", command], cwd=folder, env=environment, check=True)
        for screen in SCREENS:
            if not given.name or screen.name in given.name:
                draw(screen, folder, environment)
        for name, (width, height, what) in SHOTS.items():
            if not given.name or name in given.name:
                shot_of(
                    _opened(what, folder, environment), width, height, PICTURES / f"{name}.png", SCRIPTS.get(name, "")
                )
    return 0


def draw(screen: Screen, folder: Path, environment: Mapping[str, str]) -> None:
    """Run the command in each of its terminals, and write the pictures."""
    for columns, file in screen.files().items():
        shell = ["bash", "-c", screen.command]
        if screen.name == "completion":
            shell = ["bash", "--noprofile", "--rcfile", str(_completion(folder, environment)), "-i"]
        typed = [screen.command, *screen.typed] if screen.name == "completion" else [*screen.typed]
        printed = screen_of(shell, columns, ROWS[columns], folder, environment, typed, screen.stop_at)
        if screen.name != "completion":
            printed = f"$ {screen.command}\n{printed}"
        for shown, real in ((CHECKOUT, ROOT), (WORK, folder)):
            printed = printed.replace(str(real), shown)
        picture_of(printed.rstrip("\n"), columns, f"{columns}x{ROWS[columns]}", PICTURES / file)
        print(f"{PICTURES / file}: {screen.command}", file=sys.stderr)


def _environment(folder: Path, temp: Path) -> dict[str, str]:
    """With a `distbench` that is this checkout's, and nothing that changes what a terminal is taken for."""
    folder.mkdir(parents=True, exist_ok=True)
    command = temp / "bin" / "distbench"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m distbench "$@"\n')
    command.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
    path = f"{command.parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "DISTBENCH_MACHINE": "laptop"}


def _completion(folder: Path, environment: Mapping[str, str]) -> Path:
    """What an interactive bash reads first: docs/install.md's line."""
    file = Path(environment["PATH"].partition(":")[0]) / "bashrc"
    file.write_text("PS1='$ '\nbind 'set enable-bracketed-paste off'\n" + COMPLETION)
    return file


def _opened(what: str, folder: Path, environment: Mapping[str, str]) -> Path:
    """The file to open in a browser."""
    if what == "notebook":
        return notebook_page(ROOT / "docs" / "notebook.ipynb", folder, environment)
    report = ["distbench", "report", "--label", "try", "--page", "page.html"]
    subprocess.run(report, cwd=folder, env=dict(environment), check=True, capture_output=True)
    return folder / "page.html"


COMPLETION = 'eval "$(_DISTBENCH_COMPLETE=bash_source distbench)"\n'

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
