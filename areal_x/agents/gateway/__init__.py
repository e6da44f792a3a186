"""An endpoint that agents talk to as they would to OpenAI's or Anthropic's, and whose every answer
can be trained on.

gateway = Gateway()
await gateway.start()
with gateway.open(engine, renderer, sampling) as session:
    ...                                  # an agent, pointed at session.base_url with session.key
    outcome = await session.ended()      # then session.calls() is what there is to learn from
await gateway.close()
"""

from areal_x.agents.gateway.gateway import Gateway
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway.session_state import SessionLimits

__all__ = ["Gateway", "GatewaySession", "SessionLimits"]
