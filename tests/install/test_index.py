"""An index is passed on to pip if it answers, and left out with a note if it does not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from horovod_abs.install.index import main, why_silent


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Index) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/whl/cpu"


def test_what_answers_is_passed_on(server: str, capfd: pytest.CaptureFixture[str]) -> None:
    main([f"{server}/whl/cpu"])
    assert capfd.readouterr() == (f"--extra-index-url {server}/whl/cpu\n", "")


def test_an_index_without_the_package_has_answered(server: str) -> None:
    assert why_silent(server) == ""


def test_what_does_not_answer_is_left_out_with_a_note(nobody: str, capfd: pytest.CaptureFixture[str]) -> None:
    main([nobody])
    output, errors = capfd.readouterr()
    assert output == ""
    assert f"{nobody} does not answer" in errors
    assert "refused" in errors


def test_patience_has_an_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert "timed out" in why_silent(f"http://127.0.0.1:{mute.getsockname()[1]}", patience=0.2)


def test_no_index_no_option(capfd: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capfd.readouterr() == ("", "")
