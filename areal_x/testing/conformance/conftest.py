"""Fixtures of the suite."""

from __future__ import annotations

from areal_x.testing.conformance.fixtures import *  # noqa: F403
