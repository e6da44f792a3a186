"""An agent of LangChain and LangGraph, with a tool: python langgraph_agent.py chat|responses|messages PROMPT."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


api, prompt = sys.argv[1:]
if api == "messages":
    model = ChatAnthropic(model="policy", max_tokens=500)
else:
    model = ChatOpenAI(model="policy", use_responses_api=api == "responses")
agent = create_agent(model, [add], system_prompt="Add.")
for state in agent.stream({"messages": [{"role": "user", "content": prompt}]}, stream_mode="values"):
    last = state["messages"][-1]
print(last.text)
