"""`hardmix watch RUN`: the report of a run that is still training, refreshed from its files.

A small server for this machine only: it listens on the loopback address, and rejects requests for
other host names (DNS rebinding). It only reads; with `look`, another process keeps the galleries
in RUN/figures up to date.
"""

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from markupsafe import Markup

from hardmix.errors import InputError
from hardmix.report.live_gallery import LiveGallery
from hardmix.report.live_status import live_status, state_of
from hardmix.report.page import environment, part, render
from hardmix.runs.folder import Run
from hardmix.runs.reading import read_runs
from hardmix.runtime.console import say

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost", "::1")
"""Host names of this machine that are accepted; a tunnel may use any port."""


def watch_run(path: Path, port: int, *, look: bool = True) -> None:
    """Serve the run's page until Ctrl-C; with `look`, draw the galleries of new checkpoints."""
    server = open_server(path, port)
    server.gallery = LiveGallery(Run(path)) if look else None
    where = f"http://{LOOPBACK}:{server.server_address[1]}/"
    say(f"Watching {path} at {where} (Ctrl-C stops watching; the run continues)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("Stopped watching.")
    finally:
        server.server_close()


class PageServer(ThreadingHTTPServer):
    """A server that also keeps the galleries up to date, if it has any."""

    gallery: LiveGallery | None = None

    def service_actions(self) -> None:
        """Look for a new checkpoint, twice a second."""
        if self.gallery is not None:
            self.gallery.follow()

    def server_close(self) -> None:
        """End the process that draws, too."""
        super().server_close()
        if self.gallery is not None:
            self.gallery.close()


def open_server(path: Path, port: int) -> PageServer:
    """Return a server of the run's page; port 0 means any free port."""
    Run.open(path)
    if not 0 <= port < 65536:
        raise InputError(f"port={port} is not a port: choose 1024 to 65535, or 0 for a free one.")
    page = LivePage(path)
    handler = type("Handler", (_Handler,), {"page": page})
    try:
        return PageServer((LOOPBACK, port), handler)
    except OSError as error:
        raise InputError(
            f"port={port} cannot be used ({error.strerror}): choose another, or 0 for a free one."
        ) from error


class LivePage:
    """The current page of a run, rendered again only when its files have changed."""

    def __init__(self, path: Path) -> None:
        self._run, self._lock = Run(path), Lock()
        self._drawn: tuple[str, bytes] = ("", b"")

    def version(self) -> str:
        """Return a text that changes with the run's files and when its process is gone."""
        run = self._run
        files = [run.config_file, run.metrics_file, run.status_file, run.hardness_file]
        files += [
            file for folder in (run.results, run.figures) for file in sorted(folder.glob("*"))
        ]
        told = [state_of(run)]
        for file in files:
            try:
                facts = file.stat()
            except OSError:
                continue
            told.append(f"{file.name} {facts.st_size} {facts.st_mtime_ns}")
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]

    def content(self) -> bytes:
        """Return the page."""
        with self._lock:
            version = self.version()
            if self._drawn[0] != version:
                self._drawn = version, self._draw()
            return self._drawn[1]

    def _draw(self) -> bytes:
        (record,) = read_runs([self._run.path])
        if record.is_empty:
            raise InputError(" ".join(record.missing))
        if state_of(self._run) == "running":  # a resumed run's verdict is of its earlier encoder
            record.results.pop("verdict", None)
        script = part("watch.js")
        live = (
            environment()
            .get_template("live.html")
            .render(live=live_status(record), script=Markup(script))
        )
        missing = list(record.missing)
        page = render([record], missing, Path("report.html"), live=Markup(live), script=script)
        return page.encode()


class _Handler(BaseHTTPRequestHandler):
    page: LivePage
    server_version = "hardmix"
    sys_version = ""

    def do_GET(self) -> None:
        """Serve the page, or its version."""
        if not self._asked_here():
            self._answer(403, b"hardmix watch only serves this machine.\n")
        elif self.path in ("/", "/version"):
            self._answer_or_say(self.path)
        else:
            self._answer(404, b"Not found. The page is at /\n")

    def do_HEAD(self) -> None:
        """Serve the headers only."""
        self.do_GET()

    def _asked_here(self) -> bool:
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in NAMES
        except ValueError:
            return False

    def _answer_or_say(self, path: str) -> None:
        try:
            if path == "/version":
                self._answer(200, self.page.version().encode())
            else:
                self._answer(200, self.page.content(), "text/html")
        except InputError as error:
            self._answer(503, f"{error}\n".encode())

    def _answer(self, status: int, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""
