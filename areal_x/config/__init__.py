"""Gin files: reading them, checking their values, writing a run's own."""

from areal_x.config.reader import Config, load

__all__ = ["Config", "load"]
