"""`python -m tests.oracles`: build the environments of all oracles, or of those named; exit 1 if one fails."""

from __future__ import annotations

import sys

from tests.oracles.environments import NAMES, OracleUnavailable, environment


def main(names: list[str]) -> int:
    failed = False
    for name in names or NAMES:
        try:
            print(f"{name}: {environment(name)}")
        except OracleUnavailable as error:
            print(f"{name}: cannot be built: {error}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
