"""Headless Chromium on one file, driven over two pipes: no port is opened, no driver installed, nothing fetched."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-default-browser-check"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
TIMEOUT_S = 60.0
# The bash of a child that reads on descriptor 3 and writes on 4, as Chromium's pipe has it.
SHELL = 'exec "$@" 3<&{read} 4>&{write}'


def chromium_path() -> str | None:
    """Where a Chromium is; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab; `close` when done.

    Attributes:
        told: what the page wrote to the console, threw, or was refused, as sentences.
        asked: addresses that were asked for, the page's own first.
    """

    def __init__(self, folder: Path) -> None:
        path = chromium_path()
        assert path is not None
        (to_read, self._write), (self._read, to_write) = os.pipe(), os.pipe()
        shell = SHELL.format(read=to_read, write=to_write)
        command = ["bash", "-c", shell, "bash", path, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write), **streams)
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session, self._num_loaded = b"", 0, None, 0
        self.told: list[str] = []
        self.asked: list[str] = []
        (target,) = (one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], TIMEOUT_S)[0], "chromium says nothing"
            part = os.read(self._read, 1 << 16)
            assert part, "chromium has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.told.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.told.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.told.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._num_loaded += 1

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False, fragment: str = "") -> None:
        """Show a file in a window of that many CSS pixels, and wait until it is loaded and painted."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri() + fragment)
        ends_at = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends_at:
            if self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
                break
        self._wait_until_painted()

    def reload(self) -> None:
        """Load the page anew, and wait until it is loaded and painted."""
        self._load(lambda: self.call("Page.reload"))

    def follow(self, click: str) -> None:
        """Run a script that opens another page, and wait until the page is loaded and painted."""
        self._load(lambda: self.run(click))

    def _load(self, start: Callable[[], Any]) -> None:
        before = self._num_loaded
        start()
        while self._num_loaded == before:
            self._next()
        self._wait_until_painted()

    def _wait_until_painted(self) -> None:
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, promises awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        """End it and whatever it started."""
        os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
