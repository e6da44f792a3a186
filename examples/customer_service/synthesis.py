"""More tasks for the shop: requests about several orders, each with a program that verifies the shop's
state afterwards. A program proposes them, or a model does.

    areal-x synthesize examples.customer_service.synthesis --tasks 200 --out tasks.jsonl
    areal-x synthesize examples.customer_service.synthesis --tasks 200 --out tasks.jsonl --gin FILE.gin

    train.dataset = @synthetic_tasks()              # then, in a gin file
    synthetic_tasks.path = "tasks.jsonl"
    customer_service.serve.customer = @customer_service.Requesting

With a gin file, its model proposes, on its engine. Nothing of a proposal is believed: its solution is
run on the shop's own tools, and its verifier in the sandbox. Tasks of the right difficulty are then
chosen by `areal-x rollout` and `@curriculum()`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import gin

from areal_x import Message, Task
from areal_x.agents import Proposal, ToolError, json_object
from examples.customer_service.task import (
    ALLOWED,
    POLICY,
    STATUSES,
    Desk,
    Orders,
    changed,
    drawn_address,
)

REFUSALS = 0.3  # share of the requests that the policy refuses whole which become tasks
Question = tuple[list[Message], Callable[[str], Proposal]]
Call = tuple[str, dict[str, str]]  # a tool's name and its arguments
TOOL = {"cancel": "cancel", "refund": "refund", "move": "change_address"}

VERIFIER = '''\
def verify(before, after):
    """{title}"""
    wanted = {{number: dict(order) for number, order in before.items()}}
    for number, order in wanted.items():
        if order["customer"] == {customer!r} and {condition}:
            order.update({change})
    return after == wanted
'''

QUESTION = """\
You invent tasks for the service of a shop. {policy}

The shop's orders, by number:
{orders}

Write one request of customer {customer} that concerns at least one of their orders and takes several \
steps, the tool calls that the policy requires for it (order, cancel, refund, change_address), and a \
Python function that verifies the orders afterwards. Answer with one JSON object:
{{"request": "what the customer says", \
"solution": [{{"tool": "order", "arguments": {{"id": "..."}}}}, ...], \
"verifier": "def verify(before, after):\\n    return ..."}}
`before` and `after` are the orders as above. It must return True exactly if the policy was followed and \
nothing else was changed."""


# ---- a program that proposes


def proposed(seed: int) -> Iterator[Proposal]:
    """Yields proposals without end, the same for every run with this seed."""
    random = Random(f"proposals {seed}")
    while True:
        orders, customer = drawn_shop(random)
        kind = random.choice([every, either, several])
        request, calls, verifier = kind(random, orders, customer)
        if calls or random.random() < REFUSALS:
            yield proposal(request, orders, customer, calls, verifier)


def drawn_shop(random: Random, count: int = 8) -> tuple[Orders, str]:
    """Returns orders of two customers, and one of these."""
    customers = [str(number) for number in random.sample(range(10, 100), 2)]
    orders = {
        str(number): {
            "customer": random.choice(customers),
            "status": random.choice(STATUSES),
            "address": drawn_address(random),
        }
        for number in random.sample(range(100, 1000), count)
    }
    return orders, random.choice(customers)


def own(orders: Orders, customer: str) -> list[str]:
    return [number for number, order in orders.items() if order["customer"] == customer]


def every(random: Random, orders: Orders, customer: str) -> tuple[str, list[Call], str]:
    """A request for all orders that the policy lets it change."""
    wish, address = random.choice(list(ALLOWED)), drawn_address(random)
    request = {
        "cancel": "Please cancel all of my orders that can be cancelled.",
        "refund": "I want my money back for every order of mine that was delivered.",
        "move": f"I have moved. Send all my orders that have not left yet to {address}.",
    }[wish]
    calls = [
        call(wish, number, address)
        for number in own(orders, customer)
        if orders[number]["status"] == ALLOWED[wish]
    ]
    condition = f'order["status"] == {ALLOWED[wish]!r}'
    return request, calls, verifier_of(request, customer, condition, changed(wish, address))


def either(random: Random, orders: Orders, customer: str) -> tuple[str, list[Call], str]:
    """A request that depends on the order's status."""
    mine = own(orders, customer) or list(orders)
    number = random.choice(mine)
    request = f"If order {number} has not been sent yet, cancel it. If I have it already, I want a refund."
    status = orders[number]["status"]
    wish = next((wish for wish in ("cancel", "refund") if ALLOWED[wish] == status), None)
    allowed = wish is not None and orders[number]["customer"] == customer
    calls = [call(wish, number)] if allowed and wish else []
    condition = f'number == {number!r} and order["status"] in ("pending", "delivered")'
    change = '{"status": {"pending": "cancelled", "delivered": "refunded"}[order["status"]]}'
    return request, calls, verifier_of(request, customer, condition, change)


def several(random: Random, orders: Orders, customer: str) -> tuple[str, list[Call], str]:
    """A request for two orders, of which one may be another customer's."""
    mine = own(orders, customer)
    whose = mine if len(mine) > 1 and random.random() < 3 / 4 else list(orders)
    first, second = random.sample(whose, 2)
    wish, address = random.choice(["cancel", "refund"]), drawn_address(random)
    said = {"cancel": "cancelled", "refund": "refunded"}[wish]
    request = f"I want order {first} {said}, and order {second} sent to {address}."
    calls = [
        call(kind, number, address)
        for kind, number in ((wish, first), ("move", second))
        if orders[number]["customer"] == customer and orders[number]["status"] == ALLOWED[kind]
    ]
    changes = {
        (first, ALLOWED[wish]): changed(wish, address),
        (second, ALLOWED["move"]): changed("move", address),
    }
    condition = f'(number, order["status"]) in {changes!r}'
    change = f'{changes!r}[number, order["status"]]'
    return request, calls, verifier_of(request, customer, condition, change)


def call(wish: str, number: str, address: str = "") -> Call:
    return TOOL[wish], {"id": number, **({"address": address} if wish == "move" else {})}


def verifier_of(title: str, customer: str, condition: str, change: Any) -> str:
    return VERIFIER.format(title=title, customer=customer, condition=condition, change=change)


# ---- what becomes of a solution


def proposal(
    request: str, orders: Orders, customer: str, calls: Sequence[Call], verifier: str
) -> Proposal:
    """Returns the proposal whose solution these calls are: run on the shop's tools, whole, with each
    one left out, and with a change of an order that it does not concern.

    Raises: ValueError for calls that no tool accepts.
    """
    solved = left_by(orders, calls)
    wrong = [left_by(orders, [*calls[:i], *calls[i + 1 :]]) for i in range(len(calls))]
    others = [number for number in orders if solved[number] == orders[number]]
    wrong += [left_by(orders, [*calls, ("cancel", {"id": number})]) for number in others[:2]]
    return Proposal(
        prompt=request,
        world=orders,
        solved=solved,
        verifier=verifier,
        unsolved=[world for world in wrong if world != solved],
        metadata={"customer": customer, "request": request, "steps": len(calls)},
        untouched=solved == orders,
    )


def left_by(orders: Orders, calls: Sequence[Call]) -> Orders:
    """Returns the orders after calls of the shop's tools. Raises: ValueError for one that fails."""
    desk = Desk(orders)
    for name, arguments in calls:
        try:
            wish = next((wish for wish, tool in TOOL.items() if tool == name), None)
            if wish is not None:
                desk.change(arguments["id"], wish, arguments.get("address", ""))
            elif name == "order":
                desk.find(arguments["id"])
            else:
                raise ToolError(f"There is no tool {name!r}.")
        except (ToolError, KeyError, TypeError) as error:
            raise ValueError(f"the solution's call of {name} fails: {error}") from None
    return desk.orders


# ---- a model that proposes


def questions(seed: int) -> Iterator[Question]:
    """Yields, without end, what a model is asked for, and how its text is read."""
    random = Random(f"shops {seed}")
    while True:
        orders, customer = drawn_shop(random)
        text = QUESTION.format(
            policy=POLICY, orders=json.dumps(orders, indent=1), customer=customer
        )
        read = partial(read_proposal, orders=orders, customer=customer)
        yield [{"role": "user", "content": text}], read


def read_proposal(text: str, orders: Orders, customer: str) -> Proposal:
    """Returns the proposal in a model's text. Raises: ValueError with the reason why there is none."""
    found = json_object(text)
    request, solution, verifier = (found.get(x) for x in ("request", "solution", "verifier"))
    if not (isinstance(request, str) and isinstance(verifier, str) and isinstance(solution, list)):
        raise ValueError("the proposal lacks a request, a solution or a verifier")
    try:
        calls = [(step["tool"], dict(step["arguments"])) for step in solution]
    except (TypeError, KeyError, ValueError):
        raise ValueError("the proposal's solution is no list of calls") from None
    if any(orders.get(str(given.get("id")), {}).get("customer") != customer for _, given in calls):
        raise ValueError("the solution is about an order of somebody else")
    return proposal(request, orders, customer, calls, verifier)


# ---- the customer of such a task


@gin.configurable(module="customer_service")
class Requesting:
    """A customer of a synthetic task, who says what they want and who they are, and then accepts any
    outcome."""

    def __init__(self, task: Task) -> None:
        about = task.metadata
        self._lines = [about["request"], f"I am customer {about['customer']}."]

    async def say(self, heard: str | None) -> str | None:
        return self._lines.pop(0) if self._lines else None
