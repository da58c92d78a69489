"""A small client of Chromium's DevTools protocol over a pipe: no driver, no port, no package."""

import json
import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
SECONDS = 30
"""Seconds to wait for an answer: a browser starts slowly on a busy machine."""


def find_chrome() -> str | None:
    """Return the browser that CHROME names, or one that is installed."""
    given = os.environ.get("CHROME")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class Chrome:
    """A headless browser with one tab; `events` are those of the page shown last."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--no-default-browser-check",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses it for root
            "about:blank",
        ]
        # The protocol's pipes are always the file descriptors 3 and 4.
        words = f"exec {shlex.join([program, *options])} 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            ["bash", "-c", words],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._left, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(SECONDS)
        except (EOFError, OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(time.monotonic() + SECONDS)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def show(
        self, page: Path, width: int = 1400, scheme: str = "light", script: bool = True
    ) -> None:
        """Load a page at this width and colour scheme."""
        self.show_address(page.as_uri(), width, scheme, script)

    def show_address(
        self, address: str, width: int = 1400, scheme: str = "light", script: bool = True
    ) -> None:
        """Load a page by its address."""
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=wanted)
        self.events.clear()
        loader = self.call("Page.navigate", url=address)["loaderId"]
        deadline = time.monotonic() + SECONDS
        while not any(_is_load(event, loader) for event in self.events):
            self.events.append(self._receive(deadline))

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def complaints(self) -> list[dict[str, Any]]:
        """Return errors and messages on the console since the page began to load."""
        self.run("0")  # events before this answer have arrived
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """Return the addresses requested since the page began to load, except those in the page."""
        self.run("0")
        asked = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [
            address for address in asked if not address.startswith(("data:", "about:", "blob:"))
        ]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 16)
            if not data:
                raise EOFError("the browser has ended")
            self._left += data
        message, self._left = self._left.split(b"\0", 1)
        return json.loads(message)


def _is_load(event: dict[str, Any], loader: str) -> bool:
    """Return whether this page has loaded, and not the one before it."""
    told = event.get("params", {})
    return (event.get("method"), told.get("name"), told.get("loaderId")) == (
        "Page.lifecycleEvent",
        "load",
        loader,
    )
