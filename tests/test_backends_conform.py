"""The conformance suite of trainers (areal_x.testing.conformance), run for the installed backends."""

from __future__ import annotations

from areal_x.testing.conformance.fixtures import *  # noqa: F403
from areal_x.testing.conformance.test_construction import *  # noqa: F403
from areal_x.testing.conformance.test_files import *  # noqa: F403
from areal_x.testing.conformance.test_forward import *  # noqa: F403
from areal_x.testing.conformance.test_sampler import *  # noqa: F403
from areal_x.testing.conformance.test_update import *  # noqa: F403
