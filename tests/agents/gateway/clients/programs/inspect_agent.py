"""A task of inspect-ai, solved by its own agent with a tool: python inspect_agent.py chat|responses|messages PROMPT."""

import os
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)

    return execute


api, prompt = sys.argv[1:]
given = {} if api == "messages" else {"responses_api": api == "responses"}
model = get_model("anthropic/policy" if api == "messages" else "openai/policy", **given)
task = Task(dataset=[Sample(input=prompt, target="7")], solver=[use_tools(add()), generate()], scorer=includes())
(log,) = eval(task, model=model, display="none", log_dir=os.environ["HOME"], max_retries=0)
assert log.status == "success", log.error
print(log.samples[0].output.completion, log.results.scores[0].metrics["accuracy"].value)
