"""`hardmix watch RUN`: the report of a run that is still training, refreshed from its files.

A small server for this machine and user only: it listens on the loopback address, rejects requests
for other host names (DNS rebinding), and answers only at an address with a random token. It reads
no more than the states of files; the page is drawn by a process that ends, so that every request
has an answer whatever the files hold. With `look`, another process keeps the galleries in
RUN/figures up to date.
"""

import hashlib
import hmac
import html
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import BoundedSemaphore, Lock, Timer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hardmix.errors import InputError
from hardmix.report.live_gallery import LiveGallery
from hardmix.report.run_state import state_of
from hardmix.runtime.console import say
from hardmix.runtime.own_code import check_allowed, is_own
from hardmix.settings.saved import read_config

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost", "::1")
"""Host names of this machine that are accepted; a tunnel may use any port."""
CONNECTIONS = 32
"""Connections at a time; any more are closed."""
PATIENCE = 10.0
"""Seconds that a request, or a step of its answer, may take to arrive."""
DRAWN_EVERY = 5.0
"""Seconds between two pages, at least: drawing takes seconds of a processor."""
DRAWING = 120.0
"""Seconds that drawing a page may take."""
MOST_FILES = 10_000
"""Files of a folder whose changes are noticed."""
PROGRAM = "import sys; from hardmix.report.live_page import main; main(sys.argv[1])"
SENTENCE = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<title>hardmix watch</title><p>{}</p>
"""


def watch_run(path: Path, port: int, *, look: bool = True) -> None:
    """Serve the run's page until Ctrl-C; with `look`, draw the galleries of new checkpoints."""
    server = open_server(path, port)
    if look:
        _check_code(path / "config.json")
    server.gallery = LiveGallery(path) if look else None
    say(f"Watching {path} at {server.address} (Ctrl-C stops watching; the run continues)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("Stopped watching.")
    finally:
        server.server_close()


def _check_code(file: Path) -> None:
    """Raise UnnamedCodeError if galleries need code that the user has not named."""
    try:
        backbone = read_config(file).model.backbone
    except InputError:
        return  # the page says what is wrong with it
    if is_own(backbone):
        check_allowed(backbone, "model.backbone", str(file))


def open_server(path: Path, port: int) -> "PageServer":
    """Return a server of the run's page; port 0 means any free port."""
    if not (path / "config.json").exists():
        raise InputError(f"{path} is not a run: it has no config.json.")
    if not 0 <= port < 65536:
        raise InputError(f"port={port} is not a port: choose 1024 to 65535, or 0 for a free one.")
    try:
        return PageServer(LivePage(path), port)
    except OSError as error:
        raise InputError(
            f"port={port} cannot be used ({error.strerror}): choose another, or 0 for a free one."
        ) from error


class Drawn(NamedTuple):
    """An answer to requests for the page, and the version of the files that it shows."""

    version: str
    status: int
    content: bytes


class LivePage:
    """The current page of a run, drawn again only when its files have changed."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self._drawn: Drawn | None = None
        self._next = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def version(self) -> str:
        """Return a text that changes with the page that `content` would return."""
        drawn = self._drawn
        if drawn is not None and time.monotonic() < self._next:
            return drawn.version
        return version_of(self._path)

    def content(self) -> Drawn:
        """Return the page, or a sentence about what is wrong."""
        with self._lock:
            version = self.version()
            if self._drawn is None or self._drawn.version != version:
                self._drawn = Drawn(version, *self._draw())
                self._next = time.monotonic() + DRAWN_EVERY
            return self._drawn

    def close(self) -> None:
        """End the process that draws, if there is one."""
        if self._process is not None:
            self._process.kill()

    def _draw(self) -> tuple[int, bytes]:
        """Return an HTTP status and a page, made by another process."""
        words = [sys.executable, "-P", "-c", PROGRAM, os.fspath(self._path)]
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            with subprocess.Popen(words, stdout=subprocess.PIPE, **quiet) as self._process:
                try:
                    content = self._process.communicate(timeout=DRAWING)[0]
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    content = b"It took more than two minutes."
        except OSError as error:
            return 503, sentence(f"The page of {self._path} cannot be drawn: {error.strerror}.")
        status = self._process.returncode
        if status == 0:
            return 200, content
        said = content.decode(errors="replace") or f"the process ended with status {status}."
        return 503, sentence(f"The page of {self._path} cannot be drawn: {said}")


def sentence(text: str) -> bytes:
    """Return a page that says this, and asks again."""
    return SENTENCE.format(html.escape(text)).encode(errors="backslashreplace")


def version_of(path: Path) -> str:
    """Return a text that changes with a run's files and when its process is gone."""
    told = [state_of(path)]
    for folder in (path, path / "results", path / "figures"):
        try:
            with os.scandir(folder) as entries:
                found = sorted(islice(entries, MOST_FILES), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in found:
            with suppress(OSError):
                facts = entry.stat()
                if not entry.name.startswith("."):
                    told.append(f"{entry.name} {facts.st_size} {facts.st_mtime_ns}")
    text = "\n".join(told).encode(errors="backslashreplace")
    return hashlib.sha256(text).hexdigest()[:16]


class PageServer(ThreadingHTTPServer):
    """A server of one page that also keeps the galleries up to date, if it has any."""

    gallery: LiveGallery | None = None
    request_queue_size = CONNECTIONS

    def __init__(self, page: LivePage, port: int) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(16)
        self._free = BoundedSemaphore(CONNECTIONS)
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """The page's URL; who does not know its token gets no answer."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.token}/"

    def service_actions(self) -> None:
        """Look for a new checkpoint, twice a second."""
        if self.gallery is not None:
            self.gallery.follow()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the other side has closed the connection."""

    def server_close(self) -> None:
        """End the processes that draw, too."""
        super().server_close()
        self.page.close()
        if self.gallery is not None:
            self.gallery.close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "hardmix"
    sys_version = ""
    timeout = PATIENCE

    def setup(self) -> None:
        """Give the whole request a time limit: one byte after the other can take for ever."""
        super().setup()
        self._limit = Timer(PATIENCE, self._cut)
        self._limit.daemon = True
        self._limit.start()

    def parse_request(self) -> bool:
        """Read the headers; what follows takes its own time."""
        try:
            return super().parse_request()
        finally:
            self._limit.cancel()

    def finish(self) -> None:
        """End the connection."""
        self._limit.cancel()
        super().finish()

    def _cut(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Serve the page, or its version."""
        _, token, rest = [*self.path.split("/", 2), "", ""][:3]
        if not self._asked_here():
            self._answer(403, b"hardmix watch only serves this machine.\n")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(403, b"Use the address that hardmix watch has printed.\n")
        elif rest == "version":
            self._answer(200, self.server.page.version().encode())
        elif rest == "" and self.path.endswith("/"):
            drawn = self.server.page.content()
            self._answer(drawn.status, drawn.content, "text/html")
        else:
            self._answer(404, b"Not found. The page is at the address that was printed.\n")

    def do_HEAD(self) -> None:
        """Serve the headers only."""
        self.do_GET()

    def _asked_here(self) -> bool:
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in NAMES
        except ValueError:
            return False

    def _answer(self, status: int, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the address is the key
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""
