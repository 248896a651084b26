"""What a wrong or broken server answers is one line, whichever engine asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from forerun.errors import ForerunError, UsageError
from forerun.rollout.client import Client
from forerun.rollout.sglang.engine import SGLangEngine
from forerun.rollout.vllm import VLLMEngine

ANSWERS = ["<html>It works!</html>", "", "null", "[]", "{}", '{"results": []}', '{"data": [{}]}', "3"]


@contextmanager
def answering(text: str) -> Iterator[str]:
    """A server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_another_program_at_the_address_is_one_line(answer: str) -> None:
    with answering(answer) as url:
        with pytest.raises(ForerunError, match=f"^{url} answered /collective_rpc in another form than vLLM does"):
            VLLMEngine.connect(url)
        with pytest.raises(
            ForerunError, match=f"^{url} (is no SGLang server|answered .* and /v1/models in another form)"
        ):
            SGLangEngine(url)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:8000",
        "https://127.0.0.1",
        "http://",
        "http://h:eighty",
        "http://h:99999",
        "http://h/v1",
        "http://[::1",
    ],
)
def test_what_is_no_address_is_said_at_once(address: str) -> None:
    with pytest.raises(UsageError, match=r"is not the address of a server: give http://HOST:PORT"):
        Client("vLLM", address)
