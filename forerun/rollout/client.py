"""Calls to an engine's server: JSON over HTTP, every failure one line."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from forerun.errors import ForerunError, UsageError, one_line
from forerun.rollout.child import ChildProcess
from forerun.rollout.loopback import reason_of

# A process that was killed closes its connections before it can be seen to have ended.
_DYING_S = 1.0


class Refused(ForerunError):
    """The server answered with an HTTP status of 400 or more.

    Attributes:
        status: that status; 404 is how a version tells that it has no such call.
        reason: what the server says.
    """

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def check_address(base_url: str) -> None:
    """Refuse what is not the address of a server.

    Raises:
        UsageError: it is not http://HOST:PORT.
    """
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme == "http" and bool(parts.hostname) and not parts.path.strip("/") and parts.port != 0
    except ValueError:  # a port that is no number, or too large; half a pair of brackets
        usable = False
    if not usable:
        raise UsageError(f"{base_url!r} is not the address of a server: give http://HOST:PORT")


@dataclass(frozen=True)
class Client:
    """One server. Safe to use from several threads: each call has a connection of its own.

    Attributes:
        name: what the server is, for messages: "vLLM" or "SGLang".
        base_url: such as http://127.0.0.1:30000.
        timeout_s: seconds without a byte from the server after which a call fails; one call may ask for fewer.
        process: the server's, if it is ours.
    """

    name: str
    base_url: str
    timeout_s: float = 3600.0
    process: ChildProcess | None = None
    _calls: set[http.client.HTTPConnection] = field(default_factory=set, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_address(self.base_url)

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON that a GET gives, or its text if that is none; None for an empty answer."""
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """The JSON that a POST gives, or its text if that is none; None for an empty answer.

        Raises:
            Refused: the server said no; the message is the server's.
            ForerunError: it cannot be reached, or broke off.
        """
        return self._call("POST", path, {} if body is None else body, timeout_s)

    def hang_up(self) -> None:
        """Break off the calls that wait for an answer now: they fail. For any thread."""
        with self._lock:
            for connection in self._calls:
                if connection.sock is not None:
                    with suppress(OSError):  # the server was faster
                        connection.sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Around code that takes an answer apart.

        Raises:
            ForerunError: for what Python raises where something is missing or of another type.
        """
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ForerunError(
                f"{self.base_url} answered {path} in another form than {self.name} does ({type(error).__name__}: "
                f"{one_line(error):.200}): check the address, and the version in docs/rollout_{self.name.lower()}.md"
            ) from None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        parts = urlsplit(self.base_url)
        assert parts.hostname is not None
        patience = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=patience)
        payload = None if body is None else json.dumps(body).encode()
        with self._lock:
            self._calls.add(connection)
        try:
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            status, text = response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            if self.process is not None and self.process.ends_within(_DYING_S):
                raise ForerunError(f"the {self.name} server has ended: {self.process.last_error()}") from None
            ours = isinstance(error, TimeoutError) and error.errno is None  # the system's own comes with a number
            reason = f"nothing came for {patience:g} s" if ours else one_line(error)
            raise ForerunError(
                f"the {self.name} server at {self.base_url} did not answer {path} ({reason}): start it, or see its log"
            ) from None
        finally:
            with self._lock:
                self._calls.remove(connection)
            connection.close()
        if status >= 400:
            reason = reason_of(text)
            raise Refused(f"{self.name} refused {path} (HTTP {status}): {reason}", status, reason)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return text
