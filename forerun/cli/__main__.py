"""`python -m forerun.cli`: the command for a process that has no script on its path, such as a rank."""

from __future__ import annotations

from forerun.cli import command

if __name__ == "__main__":
    command()
