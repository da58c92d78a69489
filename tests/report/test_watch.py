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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

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
from hardmix.report import live_gallery
from hardmix.report.live_gallery import LiveGallery
from hardmix.report.live_status import live_status
from hardmix.report.watch import LivePage, open_server
from hardmix.runs.folder import Run
from hardmix.runs.reading import read_run

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


@contextmanager
def serving(run: Path):
    server = open_server(run, 0)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def get(port: int, path: str = "/", method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer


def test_the_page_follows_the_runs_files(run):
    with serving(run) as port:
        first, (status, page, answer) = get(port, "/version")[1], get(port)
        assert status == 200
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Training, epoch 5 of 8." in page
        assert "40 of 80" in page
        assert "6.000" in page  # the loss falls from 8 to 6
        assert get(port, "/version")[1] == first
        with (run / "metrics.jsonl").open("a") as log:
            log.write(
                json.dumps({"step": 45, "epoch": 4, "loss": 5.4321, "images_per_second": 64.0})
            )
            log.write("\n")
        assert get(port, "/version")[1] != first
        page = get(port)[1]
        assert "5.432" in page
        assert "45 of 80" in page
        assert "35 s" in page  # 35 steps of 64 images at 64 images a second
        write_figures(run, {"gallery.json": gallery_of(["disc", "ring"])})
        assert 'class="gallery"' in get(port)[1]
        (run / "status.json").write_text(json.dumps({"state": "done"}))
        assert "Done after 45 steps." in get(port)[1]


def test_only_this_machine_is_answered(run):
    with serving(run) as port:
        for host in ("localhost", "127.0.0.1:1234", f"localhost:{port}", "[::1]:80"):
            assert get(port, Host=host)[0] == 200, host
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[x"):
            assert get(port, Host=host)[0] == 403, host
        assert get(port, "/../config.json")[0] == 404
        assert get(port, "/config.json")[0] == 404
        assert get(port, method="POST")[0] == 501
        status, body, answer = get(port, method="HEAD")
        assert (status, body) == (200, "")
        assert int(answer.headers["Content-Length"]) > 1000


def test_a_run_that_disappears_is_said_and_watching_goes_on(run):
    with serving(run) as port:
        moved = run.rename(run.with_name("moved"))
        status, said, _ = get(port)
        assert status == 503
        assert "is not a folder" in said
        moved.rename(run)
        assert get(port)[0] == 200


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
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])
            assert get(port, "/version")[0] == 200
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
        with serving(run) as port:
            for width in (390, 1400):
                for scheme in ("dark", "light"):
                    chrome.show_address(f"http://127.0.0.1:{port}/", width, scheme)
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
    monkeypatch.setattr(LivePage, "_draw", lambda _: drawn.append(1) or b"page")
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
    with serving(run) as port:
        assert 'id="verdict"' not in get(port)[1]  # it is of the encoder before the resume
        (run / "status.json").write_text(json.dumps({"state": "done"}))
        before, page = get(port, "/version")[1], get(port)[1]
        assert page.index('id="live"') < page.index('id="verdict"') < page.index('id="neighbours"')
        assert "/photos/a.jpg" in page
        assert "file:" not in page  # a browser opens no file from a server's page
        write_figures(run, {"neighbours.json": neighbours_of(["b.jpg"])})
        assert get(port, "/version")[1] != before
        assert "/photos/b.jpg" in get(port)[1]


def test_a_gallery_is_drawn_once_for_every_checkpoint(run, monkeypatch):
    program = "import sys; open(sys.argv[1] + '/drawn', 'a').write('x')"
    monkeypatch.setattr(live_gallery, "PROGRAM", program)
    monkeypatch.setattr(live_gallery, "EVERY", 0.0)
    gallery, drawn = LiveGallery(Run(run)), run / "drawn"

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
    monkeypatch.setattr(live_gallery, "PROGRAM", "import time; time.sleep(600)")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-1.json").write_text("{}")
    server = open_server(run, 0)
    server.gallery = LiveGallery(Run(run))
    server.service_actions()
    process = server.gallery._process
    assert process is not None
    assert process.poll() is None
    server.service_actions()  # one at a time
    assert server.gallery._process is process
    server.server_close()
    assert process.poll() is not None
