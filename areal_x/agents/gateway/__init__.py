"""An endpoint that agents call like OpenAI's or Anthropic's, and whose every completion can be
trained on.

    gateway = Gateway()
    await gateway.start()
    with gateway.open(engine, renderer, sampling) as session:
        ...                                  # an agent that calls session.base_url with session.key
        outcome = await session.ended()      # then session.calls() are the calls to train on
    await gateway.close()
"""

from importlib.util import find_spec

from areal_x.errors import UserError

for _package in ("pydantic", "starlette", "uvicorn"):
    if find_spec(_package) is None:
        raise UserError(f"agents need the package {_package}: pip install 'areal-x[agents]'")

from areal_x.agents.gateway.gateway import Gateway  # noqa: E402
from areal_x.agents.gateway.session import GatewaySession  # noqa: E402
from areal_x.agents.gateway.session_state import SessionLimits  # noqa: E402

__all__ = ["Gateway", "GatewaySession", "SessionLimits"]
