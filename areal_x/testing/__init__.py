"""What tests of areal_x, of its backends and of what is built on it share: tiny models, the
conformance suite of trainers (areal_x.testing.conformance), and the names of areal_x.simulation.

Importing this package imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_x.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from areal_x.simulation import Attempt as Attempt
    from areal_x.simulation import Deadlock as Deadlock
    from areal_x.simulation import FakeEngine as FakeEngine
    from areal_x.simulation import FakeTrainer as FakeTrainer
    from areal_x.simulation import Length as Length
    from areal_x.simulation import Speed as Speed
    from areal_x.simulation import VirtualLoop as VirtualLoop
    from areal_x.simulation import fixed as fixed
    from areal_x.simulation import lognormal as lognormal
    from areal_x.simulation import ring as ring
    from areal_x.simulation import run as run
    from areal_x.simulation import simulate as simulate
    from areal_x.simulation import uniform as uniform
    from areal_x.testing.models import write_model as write_model
    from areal_x.testing.models import write_tokenizer as write_tokenizer

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "areal_x.simulation": "Attempt Deadlock FakeEngine FakeTrainer Length Speed VirtualLoop"
        " fixed lognormal ring run simulate uniform",
        "areal_x.testing.models": "write_model write_tokenizer",
    },
)
