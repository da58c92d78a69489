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
from hardmix.runtime.console import say
from hardmix.runtime.files import read_json
from hardmix.runtime.own_code import allow_code, allowed_code, check_allowed, is_own
from hardmix.settings.saved import build_config

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost", "::1")
"""Accepted names of this machine; a tunnel may use any port."""
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
PAGE_PROGRAM = "import sys; from hardmix.report.live_page import main; main(sys.argv[1])"
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
        backbone = build_config(read_json(file), str(file)).model.backbone
    except (InputError, OSError, ValueError):
        return  # the page explains what is wrong
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
        words = [sys.executable, "-P", "-c", PAGE_PROGRAM, os.fspath(self._path)]
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
        reason = content.decode(errors="replace") or f"the process ended with status {status}."
        return 503, sentence(f"The page of {self._path} cannot be drawn: {reason}")


def sentence(text: str) -> bytes:
    """Return a page with a sentence, which reloads itself."""
    return SENTENCE.format(html.escape(text)).encode(errors="backslashreplace")


def state_of(folder: Path) -> str:
    """Return the state in status.json; "lost" if it says running but its process is gone."""
    try:
        status = read_json(folder / "status.json")
    except (OSError, ValueError):
        return "unknown"
    state = status.get("state") if isinstance(status, dict) else None
    if not isinstance(state, str):
        return "unknown"
    gone = status.get("host") == socket.gethostname() and not _alive(status.get("process"))
    return "lost" if state == "running" and gone else state


def _alive(process: object) -> bool:
    """Return whether a process exists; True if that is unknown."""
    if not isinstance(process, int) or process < 1:
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def version_of(path: Path) -> str:
    """Return a text that changes with a run's files and when its process is gone."""
    facts = [state_of(path)]
    for folder in (path, path / "results", path / "figures"):
        try:
            with os.scandir(folder) as entries:
                files = sorted(islice(entries, MOST_FILES), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in files:
            with suppress(OSError):
                stat = entry.stat()
                if not entry.name.startswith("."):
                    facts.append(f"{entry.name} {stat.st_size} {stat.st_mtime_ns}")
    text = "\n".join(facts).encode(errors="backslashreplace")
    return hashlib.sha256(text).hexdigest()[:16]


# -- galleries of a run that is still training

GALLERY_PAUSE = 60.0
"""Least seconds between the end of a gallery and the beginning of the next."""
GALLERY_PROGRAM = (
    "import sys; from hardmix.report.watch import draw_galleries; draw_galleries(*sys.argv[1:])"
)


class LiveGallery:
    """Keeps similar images and hardest negatives up to date, in a process of its own.

    It starts the process for each new checkpoint, and never waits for it. The process takes one
    core, and leaves it to the training if that needs it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._drawn: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0.0

    def follow(self) -> None:
        """Start a process if the newest checkpoint has no gallery and none is under way."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._process, self._next = None, time.monotonic() + GALLERY_PAUSE
        newest = newest_checkpoint(self._path / "checkpoints")
        if newest is None or newest == self._drawn or time.monotonic() < self._next:
            return
        self._drawn = newest
        self._process = subprocess.Popen(
            # -P: no modules of the current folder, which may be the run's.
            [sys.executable, "-P", "-c", GALLERY_PROGRAM, os.fspath(self._path), *allowed_code()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the page lists missing galleries
        )

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def newest_checkpoint(folder: Path) -> str | None:
    """Return a text that changes with the newest checkpoint; None if there is none."""
    try:
        files = [(file.stat().st_mtime_ns, file.name) for file in folder.iterdir()]
    except OSError:
        return None
    return f"{max(files)}" if files else None


def draw_galleries(path: str, *allowed: str) -> None:
    """Make the galleries of the newest checkpoint, at the lowest priority.

    `allowed` are the names of code that the run may use.
    """
    from hardmix.report.looking import look_at  # here, as these import torch
    from hardmix.runs.folder import Run

    if hasattr(os, "nice"):
        os.nice(19)
    allow_code(*allowed)
    look_at(Run(Path(path)), live=True)


# -- the server


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
        """The page's URL; without its token there is no answer."""
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
        """Print nothing: the other side has closed the connection."""

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
        """Limit the time of the whole request, which might arrive byte by byte."""
        super().setup()
        self._limit = Timer(PATIENCE, self._cut)
        self._limit.daemon = True
        self._limit.start()

    def parse_request(self) -> bool:
        """Read the headers; the limit does not apply to the answer."""
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
