"""`hardmix watch`: the page of a run that trains, refreshed from its files."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread, active_count
from urllib.parse import urlsplit

import pytest

from chrome import Chrome, find_chrome
from fake_runs import (
    config_of,
    gallery_of,
    map_of,
    metrics_of,
    neighbours_of,
    verdict_of,
    write_figures,
    write_run,
)
from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.report import watch
from hardmix.report.live_page import live_status, recent_speed
from hardmix.report.watch import LiveGallery, LivePage, open_server
from hardmix.runs.reading import read_run
from hardmix.runtime.console import duration

pytestmark = pytest.mark.slow

PROGRAM = find_chrome()


def training_run(path: Path, epochs: int = 4, **status) -> Path:
    """Ten steps an epoch, 8 epochs planned, by this very process."""
    config = config_of("mochi", train__epochs=8, train__batch_size=64)
    run = write_run(path, config, metrics_of(epochs))
    (run / "results" / "pretrain.json").unlink()
    told = {"state": "running", "process": os.getpid(), "host": socket.gethostname()}
    (run / "status.json").write_text(json.dumps(told | status))
    return run


@pytest.fixture
def run(tmp_path) -> Path:
    return training_run(tmp_path / "run <b>")


@pytest.fixture(autouse=True)
def drawn_at_once(monkeypatch):
    monkeypatch.setattr(watch, "DRAWN_EVERY", 0.0)


@contextmanager
def serving(run: Path):
    """Yield the address of the page."""
    server = open_server(run, 0)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.address
    server.shutdown()
    thread.join()
    server.server_close()


def get(address: str, path: str = "/", method: str = "GET", **headers: str):
    place = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=120)
    connection.request(method, place.path.rstrip("/") + path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer


def test_the_page_follows_the_runs_files(run):
    with serving(run) as page_at:
        first, (status, page, answer) = get(page_at, "/version")[1], get(page_at)
        assert status == 200
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Training, epoch 5 of 8." in page
        assert "40 of 80" in page
        assert "6.000" in page  # the loss falls from 8 to 6
        assert get(page_at, "/version")[1] == first
        with (run / "metrics.jsonl").open("a") as log:
            log.write(
                json.dumps({"step": 45, "epoch": 4, "loss": 5.4321, "images_per_second": 64.0})
            )
            log.write("\n")
        assert get(page_at, "/version")[1] != first
        page = get(page_at)[1]
        assert "5.432" in page
        assert "45 of 80" in page
        speed = recent_speed(read_run(run).metrics)
        assert duration(35 * 64 / speed) in page  # 35 steps of 64 images
        write_figures(run, {"gallery.json": gallery_of(["disc", "ring"])})
        assert 'class="gallery"' in get(page_at)[1]
        (run / "status.json").write_text(json.dumps({"state": "done"}))
        assert "Done after 45 steps." in get(page_at)[1]


def test_only_this_machine_is_answered(run):
    with serving(run) as page_at:
        number = urlsplit(page_at).port
        for host in ("localhost", "127.0.0.1:1234", f"localhost:{number}", "[::1]:80"):
            assert get(page_at, Host=host)[0] == 200, host
        for host in ("evil.example", f"evil.example:{number}", "127.0.0.1.evil.example", "", "[x"):
            assert get(page_at, Host=host)[0] == 403, host
        assert get(page_at, "/../config.json")[0] == 404
        assert get(page_at, "/config.json")[0] == 404
        assert get(page_at, method="POST")[0] == 501
        status, body, answer = get(page_at, method="HEAD")
        assert (status, body) == (200, "")
        assert int(answer.headers["Content-Length"]) > 1000


def test_a_run_that_disappears_is_said_and_watching_goes_on(run):
    with serving(run) as page_at:
        moved = run.rename(run.with_name("moved"))
        status, said, _ = get(page_at)
        assert status == 503
        assert "is not a folder" in said
        moved.rename(run)
        assert get(page_at)[0] == 200


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"state": "stopped"}, "Stopped after 40 steps; resume with hardmix pretrain --resume."),
        ({"state": "failed"}, "Failed after 40 steps."),
        ({"process": 2**22 + 1}, "Its process ended unexpectedly after 40 steps."),
        ({"process": 2**22 + 1, "host": "another"}, "Training, epoch 5 of 8."),
        ({"state": 7}, "40 steps so far."),
    ],
)
def test_the_state_is_said_in_words(status, said, tmp_path):
    found = live_status(read_run(training_run(tmp_path / "run", **status)))
    assert found.sentence == said
    assert found.share == 0.5


def test_the_length_of_the_first_epoch_is_known_from_the_images(tmp_path):
    run = training_run(tmp_path / "run", epochs=1)
    config = config_of("mochi", train__epochs=8, train__batch_size=64, data__num_images=6400)
    (run / "config.json").write_text(json.dumps(config))
    assert dict(live_status(read_run(run)).facts)["Step"] == "10 of 800"
    config["data"]["num_images"] = None
    (run / "config.json").write_text(json.dumps(config))
    assert live_status(read_run(run)).share is None
    (run / "metrics.jsonl").unlink()
    assert live_status(read_run(run)).sentence == "Training."


def test_the_time_left_does_not_hang_on_a_single_step():
    """The last line of an epoch may be about one step, which waited for its images."""
    steady = [{"step": 50 * n, "images_per_second": 500.0} for n in range(1, 5)]
    assert recent_speed(steady) == pytest.approx(500)
    one_step = {"step": 201, "images_per_second": 20.0}
    assert recent_speed([*steady, one_step]) == pytest.approx(201 / (200 / 500 + 1 / 20))
    many = [{"step": 50 * n, "images_per_second": 500.0} for n in range(1, 50)]
    assert recent_speed([*many, one_step | {"step": 2451}]) > 400
    odd = [{"step": "x"}, {"images_per_second": 0.0, "step": 3}, {"knn": 0.5, "step": 4}]
    assert recent_speed(odd) is None


def test_wrong_input_is_one_message_and_status_2(run, tmp_path, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = [
            (["watch", tmp_path / "none"], "is not a run"),
            (["watch", run, "--port", "70000"], "port=70000"),
            (["watch", run, "--port", "-1"], "port=-1"),
            (["watch", run, "--port", port], f"port={port} cannot be used"),
            (["watch"], "RUN"),
        ]
        for words, said in cases:
            with pytest.raises(SystemExit) as ended:
                cli.main([str(word) for word in words])
            shown = capfd.readouterr().err
            assert ended.value.code == 2
            assert said in shown
            assert "Traceback" not in shown
    with pytest.raises(InputError):
        open_server(tmp_path / "none", 0)


def test_the_command_prints_its_address_and_ends_with_ctrl_c(run):
    words = [sys.executable, "-u", "-m", "hardmix", "watch", str(run), "--port", "0"]
    # Whoever runs the tests in the background ignores Ctrl-C, and a child would inherit that.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            page_at = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", line)[0]
            assert get(page_at, "/version")[0] == 200
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert said == "Stopped watching.\n"


@pytest.mark.skipif(PROGRAM is None, reason="no browser: install chromium, or set CHROME to one")
def test_the_browser_shows_new_lines_and_keeps_what_was_chosen(run, tmp_path):
    chrome = Chrome(PROGRAM, tmp_path / "profile")
    try:
        with serving(run) as page_at:
            for width in (390, 1400):
                for scheme in ("dark", "light"):
                    chrome.show_address(page_at, width, scheme)
                    assert chrome.run("document.documentElement.scrollWidth") <= width
                    paper = chrome.run("getComputedStyle(document.body).backgroundColor")
                    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
                    progress = "document.getElementById('live').getBoundingClientRect().bottom"
                    assert chrome.run(progress) < 900
            chrome.run("document.querySelector('input[value=proxy_accuracy]').click()")
            chrome.run("document.querySelector('#curve-table').open = true")
            chrome.run("scrollTo({top: 300, behavior: 'instant'})")
            with (run / "metrics.jsonl").open("a") as log:
                line = {"step": 45, "epoch": 4, "loss": 5.4321, "proxy_accuracy": 0.625}
                log.write(json.dumps(line) + "\n")
            chrome.run(
                "(async () => { while (!document.getElementById('live').textContent.includes("
                "'45 of 80')) await new Promise(done => setTimeout(done, 50)); })()"
            )
            assert chrome.run("document.querySelector('input[name=metric]:checked').value") == (
                "proxy_accuracy"
            )
            assert chrome.run("document.querySelector('#curve-table').open")
            assert chrome.run("document.querySelector('.legend .value').textContent") == "62.5 %"
            assert chrome.run("scrollY") == 300
            assert chrome.run("document.querySelectorAll('#chart svg .curve').length") == 1
            assert "ago" in chrome.run("document.getElementById('age').textContent")
            assert chrome.complaints() == []
    finally:
        chrome.close()
        shutil.rmtree(tmp_path / "profile", ignore_errors=True)


def test_the_page_is_drawn_again_only_when_something_has_changed(run, monkeypatch):
    page = LivePage(run)
    drawn = []
    monkeypatch.setattr(LivePage, "_draw", lambda _: drawn.append(1) or (200, b"page"))
    page.content()
    page.content()
    assert len(drawn) == 1
    os.utime(run / "metrics.jsonl", ns=(1, 1))
    page.content()
    assert len(drawn) == 2


def test_the_newest_galleries_and_the_verdict_are_on_the_page_without_links_to_files(run):
    write_figures(run, {"neighbours.json": neighbours_of(["a.jpg"])})
    write_figures(run, {"embedding-map.json": map_of(["cat"])})
    (run / "results" / "verdict.json").write_text(json.dumps(verdict_of()))
    with serving(run) as page_at:
        assert 'id="verdict"' not in get(page_at)[1]  # it is of the encoder before the resume
        (run / "status.json").write_text(json.dumps({"state": "done"}))
        before, page = get(page_at, "/version")[1], get(page_at)[1]
        assert page.index('id="live"') < page.index('id="verdict"') < page.index('id="neighbours"')
        assert "/photos/a.jpg" in page
        assert "file:" not in page  # a browser opens no file from a server's page
        write_figures(run, {"neighbours.json": neighbours_of(["b.jpg"])})
        assert get(page_at, "/version")[1] != before
        assert "/photos/b.jpg" in get(page_at)[1]


def test_a_gallery_is_drawn_once_for_every_checkpoint(run, monkeypatch):
    program = "import sys; open(sys.argv[1] + '/drawn', 'a').write('x')"
    monkeypatch.setattr(watch, "GALLERY_PROGRAM", program)
    monkeypatch.setattr(watch, "GALLERY_PAUSE", 0.0)
    gallery, drawn = LiveGallery(run), run / "drawn"

    def follow() -> str:
        for _ in range(3):
            gallery.follow()
            if gallery._process is not None:
                gallery._process.wait()
        return drawn.read_text() if drawn.exists() else ""

    assert follow() == ""  # no checkpoint yet
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-1.json").write_text("{}")
    assert follow() == "x"
    assert follow() == "x"
    (run / "checkpoints" / "step-2.json").write_text("{}")
    assert follow() == "xx"


def test_closing_the_server_ends_the_drawing(run, monkeypatch):
    monkeypatch.setattr(watch, "GALLERY_PROGRAM", "import time; time.sleep(600)")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-1.json").write_text("{}")
    server = open_server(run, 0)
    server.gallery = LiveGallery(run)
    server.service_actions()
    process = server.gallery._process
    assert process is not None
    assert process.poll() is None
    server.service_actions()  # one at a time
    assert server.gallery._process is process
    server.server_close()
    assert process.poll() is not None


def test_without_its_token_the_page_is_not_served(run):
    """Other users of the machine can connect, too."""
    with serving(run) as page_at:
        bare = f"http://127.0.0.1:{urlsplit(page_at).port}"
        for path in ("/", "/version", "/x/", "//", "/x/version", urlsplit(page_at).path[:-3] + "/"):
            status, said, _ = get(bare, path)
            assert (status, said) == (403, "Use the address that hardmix watch has printed.\n")
        assert get(page_at.rstrip("/"), "")[0] == 404  # it needs its last slash
    with serving(run) as again:
        assert urlsplit(again).path != urlsplit(page_at).path
        assert len(urlsplit(again).path) > 20


def odd_status(run: Path) -> None:
    told = {"state": "running", "process": 2**31, "host": socket.gethostname()}
    (run / "status.json").write_text(json.dumps(told))


def surrogate(run: Path) -> None:
    (run / "status.json").write_text('{"state": "\\ud800"}')
    (run / "results" / "x.json").write_text('{"top1": "\\ud800", "command": "\\udfff"}')


def odd_name(run: Path) -> None:
    (run / "results").mkdir(exist_ok=True)
    Path(os.fsdecode(os.fsencode(run / "results") + b"/\xff\xfe.json")).write_text('{"top1": 1}')


def odd_gzip(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "epoch": 0}\n')
    (run / "images.txt.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff")


def odd_epochs(run: Path) -> None:
    config = config_of("mochi", train__epochs=10**300, train__batch_size=1)
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text('{"step": 9, "epoch": 1, "images_per_second": 1e-300}\n')


def true_epochs(run: Path) -> None:
    (run / "config.json").write_text(json.dumps(config_of("mochi", train__epochs=True)))


def odd_steps(run: Path) -> None:
    (run / "metrics.jsonl").write_text(f'{{"step": {10**300}, "epoch": 1, "loss": 1e308}}\n')


def fifo(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    os.mkfifo(run / "results" / "fifo.json")


def endless(run: Path) -> None:
    (run / "hardness.jsonl").symlink_to("/dev/zero")
    (run / "results" / "x.json").symlink_to("/dev/zero")


ODD = [
    odd_status,
    surrogate,
    odd_name,
    odd_gzip,
    odd_epochs,
    true_epochs,
    odd_steps,
    fifo,
    endless,
]


@pytest.mark.parametrize("spoil", ODD)
def test_every_request_is_answered_whatever_the_files_hold(spoil, run, capfd):
    spoil(run)
    with serving(run) as page_at:
        assert get(page_at, "/version")[0] == 200
        status, page, _ = get(page_at)
        assert status == 200
        assert 'id="live"' in page
    assert capfd.readouterr().err == ""


def test_what_cannot_be_drawn_is_a_sentence_on_the_page(run, monkeypatch, capfd):
    for program, said in {
        "raise MemoryError": "the process ended with status 1.",
        "import os; os.kill(os.getpid(), 9)": "the process ended with status -9.",
        "import sys; print('<b> is odd', end=''); sys.exit(3)": "&lt;b&gt; is odd",
    }.items():
        monkeypatch.setattr(watch, "PAGE_PROGRAM", program)
        with serving(run) as page_at:
            status, page, answer = get(page_at)
            assert (status, answer.headers["Content-Type"]) == (503, "text/html; charset=utf-8")
            assert "cannot be drawn: " + said in page
    monkeypatch.setattr(watch, "PAGE_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(watch, "DRAWING", 0.1)
    with serving(run) as page_at:
        assert "It took more than two minutes." in get(page_at)[1]
    assert capfd.readouterr().err == ""


def test_pages_are_drawn_at_intervals(run, monkeypatch):
    monkeypatch.setattr(watch, "DRAWN_EVERY", 1000.0)
    monkeypatch.setattr(LivePage, "_draw", lambda _: (200, b"page"))
    page = LivePage(run)
    drawn = page.content()
    os.utime(run / "metrics.jsonl", ns=(1, 1))
    assert page.version() == drawn.version  # a browser need not ask for the same page again
    assert page.content() is drawn
    page._next = 0.0
    assert page.version() != drawn.version


def test_connections_are_limited_and_time_out(run, monkeypatch, capfd):
    monkeypatch.setattr(watch, "PATIENCE", 0.5)
    monkeypatch.setattr(watch._Handler, "timeout", 0.5)
    before = active_count()
    with serving(run) as page_at:
        place = "127.0.0.1", urlsplit(page_at).port
        idle = [socket.create_connection(place, timeout=60) for _ in range(200)]
        assert active_count() - before <= 2 * watch.CONNECTIONS + 2  # each with a time limit
        for each in idle:
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""  # the server closes it
            each.close()
        assert get(page_at, "/version")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_request_byte_by_byte_ends_too(run, monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE", 0.5)
    with serving(run) as page_at:
        with socket.create_connection(("127.0.0.1", urlsplit(page_at).port), timeout=60) as slow:
            ended = False
            for _ in range(1000):
                try:
                    slow.sendall(b"G")
                    slow.settimeout(0.02)
                    ended = slow.recv(1) == b""
                except TimeoutError:
                    continue
                except OSError:
                    ended = True
                if ended:
                    break
        assert ended


def test_a_closed_connection_prints_nothing(run, capfd):
    with serving(run) as page_at:
        place = urlsplit(page_at)
        for text in (f"GET {place.path} HTTP/1.0\r\n\r\n", f"GET {place.path}", "\x00\xff" * 9):
            with socket.create_connection(("127.0.0.1", place.port)) as rude:
                rude.sendall(text.encode())
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        assert get(page_at)[0] == 200
    shown = capfd.readouterr()
    assert shown.err + shown.out == ""


def test_the_server_is_small(run):
    words = [sys.executable, "-u", "-m", "hardmix", "watch", str(run), "--port", "0", "--no-look"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert get(re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", line)[0])[0] == 200
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
    assert int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) < 100_000  # 740 MB before
