"""The checkpoint doctor: `forerun inspect`."""

from forerun.doctor.command import inspect

__all__ = ["inspect"]
