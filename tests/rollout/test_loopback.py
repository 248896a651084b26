"""What an error answer of a server says, in one line."""

from __future__ import annotations

import pytest

from forerun.rollout.loopback import reason_of


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"error": {"message": "too\\nlong", "code": 400}}', "too long"),
        ('{"message": "no such call"}', "no such call"),
        ('{"detail": "Not Found"}', "Not Found"),
        ("Internal Server Error", "Internal Server Error"),
        ("x" * 600, "x" * 500),
        ("", "no reason given"),
    ],
)
def test_the_reason_is_found_in_every_form(text: str, reason: str) -> None:
    assert reason_of(text) == reason
