"""Pictures: what a command prints in a terminal of a given size, as an SVG that loads nothing; a page in a browser."""

import base64
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.chromium import Browser

TIMEOUT_S, SILENT_S = 600.0, 3.0
NUM_COLOURS = 64
# rich's own format names a font of a content delivery network; a picture in an <img> may load nothing.
FONTS = 'Consolas, Menlo, "DejaVu Sans Mono", "Liberation Mono", monospace'
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px {fonts}; }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def screen_of(
    command: Sequence[str],
    columns: int,
    rows: int,
    folder: Path,
    environment: Mapping[str, str],
    typed: Sequence[str] = (),
    stop_at: str = "",
) -> str:
    """All that the command wrote to a terminal of that size, lines ended by a newline.

    Args:
        typed: what is written to it, one after the other where it has written something and is silent. What is
            silent after that too is ended.
        stop_at: a pattern; what stood there when the last line first matched it is given, and the command goes on.

    Raises:
        TimeoutError: it did not end.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.chdir(folder)
        os.execvpe(command[0], list(command), {**environment, "TERM": "xterm-256color"})
    written, kept, ends_at, is_typing = b"", None, time.monotonic() + TIMEOUT_S, bool(typed)
    try:
        while True:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"{' '.join(command)} did not end in {TIMEOUT_S:g} s")
            if not select.select([terminal], [], [], SILENT_S)[0]:
                if is_typing and not typed:
                    break
                if typed and written:
                    os.write(terminal, typed[0].encode())
                    typed = typed[1:]
                continue
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # Linux says so where the other side has closed
                break
            if not part:
                break
            written += part
            last = re.split(r"[\r\n]", _without_codes(written.decode(errors="replace")).rstrip())[-1]
            if stop_at and kept is None and re.search(stop_at, last):
                kept = written
    finally:
        os.close(terminal)
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGHUP)
            os.waitpid(pid, 0)
    return (kept or written).decode(errors="replace").replace("\r\n", "\n")


def _without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text)


def picture_of(printed: str, columns: int, title: str, path: Path) -> None:
    """Write what was printed as an SVG; colours are those of a dark terminal, readable on any page."""
    from rich.console import Console
    from rich.terminal_theme import DIMMED_MONOKAI
    from rich.text import Text

    console = Console(record=True, width=columns, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    # The clip of the last line would take its underscores away.
    console.print(Text.from_ansi(f"{printed}\n"), soft_wrap=False, overflow="ignore", crop=False, no_wrap=True)
    svg = console.export_svg(
        title=title, code_format=FORMAT.replace("{fonts}", FONTS), theme=DIMMED_MONOKAI, unique_id=path.stem
    )
    path.write_text(svg, encoding="utf-8")


def shot_of(page: Path, width: int, height: int, path: Path, script: str = "") -> None:
    """A picture of the top of a page in a window of that many CSS pixels, of few colours and so small.

    A wider page makes the window wider: nothing is cut at the right. `script` runs in the page before.
    """
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder))
        try:
            browser.open(page, width, height)
            wide = browser.run("document.documentElement.scrollWidth")
            if wide > width:
                browser.open(page, wide, height)
            if script:
                browser.run(script)
            data = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
        finally:
            browser.close()
    Image.open(io.BytesIO(data)).convert("RGB").quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE).save(
        path, optimize=True
    )
