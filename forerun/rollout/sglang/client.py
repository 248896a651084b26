"""Calls to an SGLang server: JSON over HTTP, every failure one line."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from forerun.errors import ForerunError, UsageError, one_line
from forerun.rollout.loopback import reason_of


class Refused(ForerunError):
    """The server answered with an HTTP status of 400 or more.

    Attributes:
        status: that status; 404 is how a version tells that it has no such call.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Client:
    """One server. Safe to use from several threads: each call has a connection of its own.

    Attributes:
        base_url: such as http://127.0.0.1:30000.
        timeout_s: seconds without a byte from the server after which a call fails.
    """

    base_url: str
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise UsageError(f"{self.base_url!r} is not the address of a server: give http://HOST:PORT")

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON that a GET gives, None for an empty answer."""
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """The JSON that a POST gives, None for an empty answer.

        Raises:
            Refused: the server said no; the message is the server's.
            ForerunError: it cannot be reached, or broke off.
        """
        return self._call("POST", path, {} if body is None else body, timeout_s)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        parts = urlsplit(self.base_url)
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(
            parts.hostname, parts.port or 80, timeout=self.timeout_s if timeout_s is None else timeout_s
        )
        payload = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            status, text = response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ForerunError(
                f"the SGLang server at {self.base_url} did not answer {path} ({one_line(error)}): see its log"
            ) from None
        finally:
            connection.close()
        if status >= 400:
            raise Refused(f"SGLang refused {path} (HTTP {status}): {reason_of(text)}", status)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return text
