"""docs/screens.md against `benchmarks/screens.py`: each picture is there with its command, small, and loads nothing."""

import re
import shlex

from click.testing import CliRunner
from conftest import ROOT

from benchmarks.screens import CHECKOUT, PICTURES, SCREENS, SHOTS
from distbench.cli.main import main

PAGE = (ROOT / "docs" / "screens.md").read_text()
FILES = {file: screen for screen in SCREENS for file in screen.files().values()}
MAX_BYTES = 1_500_000


def test_every_picture_is_on_the_page_with_its_command() -> None:
    shown = re.findall(r"\]\(images/screens/([\w.-]+)\)", PAGE)
    assert sorted(shown) == sorted([*FILES, *(f"{name}.png" for name in SHOTS if "/" not in name)])
    assert sorted(path.name for path in PICTURES.iterdir()) == sorted(shown)
    for file, screen in FILES.items():
        message = PAGE[: PAGE.index(f"images/screens/{file}")].rpartition("\n## ")[2]
        assert file == "progress.svg" or screen.command in message, file


def test_pictures_are_small_load_nothing_and_name_nobody() -> None:
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < MAX_BYTES
    for file in FILES:
        text = (PICTURES / file).read_text()
        # A clip's own name, and the format's.
        assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", text), file
        assert "/tmp" not in text and str(ROOT) not in text and "/root" not in text
    assert CHECKOUT.encode() in (PICTURES / "list.svg").read_bytes()


def test_their_commands_are_ones_that_the_command_line_takes() -> None:
    for screen in SCREENS:
        name, *words = shlex.split(screen.command)[1:]
        if name in main.commands:
            known = {option for parameter in main.commands[name].params for option in parameter.opts}
            assert {word for word in words if re.match(r"--?[a-z]", word)} <= known, screen.command
    assert "no scenario 'tp_mpl'" in CliRunner().invoke(main, ["run", "tp_mpl", "--mesh", "tp=2"]).output
