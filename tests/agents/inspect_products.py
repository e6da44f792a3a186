"""A task of inspect-ai: products, with or without a tool."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool(name="python")
def multiply() -> Tool:
    async def execute(code: str) -> str:
        """Runs Python.

        Args:
            code: The program.
        """
        a, b = code.split("*")
        return str(int(a) * int(b))

    return execute


@task
def products(digits: int = 3, tools: bool = False) -> Task:
    print("a task may print")
    numbers = [10 ** (digits - 1) + n for n in range(3)]
    samples = [Sample(input=f"{n}*{n}=", target=str(n * n), id=f"of-{n}") for n in numbers]
    solver = [use_tools(multiply()), generate()] if tools else [generate()]
    return Task(dataset=MemoryDataset(samples), solver=solver, scorer=exact())
