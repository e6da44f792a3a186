"""A shop whose customers want orders cancelled, refunded or redirected, subject to its policy.

    customer: I want a refund.               agent: Which order?
    customer: I am customer 17, the order is 305.
    agent: order("305") → {"customer": "17", "status": "delivered", "address": "4 Elm Road"}
    agent: refund("305") → Done.             agent: Done.

The tools do not enforce the policy: following it is the agent's task. The reward is 1 if the final
state of the orders is the one the policy requires and no order was changed without looking it up
first, otherwise 0. In the manner of τ²-bench (arXiv 2506.07982).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from random import Random
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import gin

from areal_x import Message, Task, at_least, one_of
from areal_x.agents import Toolbox, ToolError, verified
from areal_x.sandbox import Sandbox

TRAINING, HELD_OUT = 4000, 200  # tasks
POLICY = """\
You serve the customers of a shop. Its policy:
- Find out who the customer is, by number, and which order it is about, before you do anything.
- Look at an order before you change it. Do so only for the customer whose order it is, and only what they ask for.
- An order that is pending can be cancelled, and its address changed. One that is delivered can be refunded. Nothing else.
- Where the policy does not allow what they want, change nothing, and say that it is not possible."""
STATUSES = ("pending", "shipped", "delivered")
STREETS = ("Elm Road", "Mill Lane", "High Street", "Park Row", "Station Road", "Church Street")
WISHES = {
    "cancel": "I want to cancel an order.",
    "refund": "I want a refund.",
    "move": "I have moved.",
}
# the status that the policy requires
ALLOWED = {"cancel": "pending", "refund": "delivered", "move": "pending"}
CUSTOMER = """\
You play a customer who talks to the service of a shop. You are customer {customer}. What you want is about order {order}: \
{wish} Stay with what you want, say in one or two short sentences only what you are asked for, and invent nothing. When it is \
done, or when you were told that it is not possible, answer {over} and nothing else."""
OVER = "###OVER###"

Orders = dict[str, dict[str, str]]  # by number: customer, status, address


@gin.configurable(module="customer_service")
def tasks(split: str = "train", orders: int = 4, seed: int = 0) -> list[Task]:
    """Returns 4,000 conversations to hold or, for the split "test", 200 others, the same for every
    seed.

    Each has its own database of orders. A task's metadata holds the initial orders and the
    customer's number, order, request and new address; its answer is the final state of the orders
    that the policy requires.

    Args:
        split: "train" or "test".
        orders: Orders in each database, at least 2.
        seed: Seed of the training conversations.
    """
    one_of("customer_service.tasks.split", split, ("train", "test"))
    at_least("customer_service.tasks.orders", orders, 2)
    random = Random("held out" if split == "test" else f"training {seed}")
    return [
        drawn_task(random, f"{split}/{number}", orders)
        for number in range(HELD_OUT if split == "test" else TRAINING)
    ]


def drawn_task(random: Random, id: str, orders: int) -> Task:
    """Samples a task; one in six customers names another customer's order."""
    customers = [str(number) for number in random.sample(range(10, 100), 2)]
    numbers = [str(number) for number in random.sample(range(100, 1000), orders)]
    owners = [*customers, *random.choices(customers, k=orders - 2)]  # at least one each
    database = {
        number: {
            "customer": owner,
            "status": random.choice(STATUSES),
            "address": drawn_address(random),
        }
        for number, owner in zip(numbers, owners, strict=True)
    }
    order, wish = random.choice(numbers), random.choice(list(WISHES))
    customer = database[order]["customer"]
    if random.random() < 1 / 6:
        customer = next(other for other in customers if other != customer)
    about = {"customer": customer, "order": order, "wish": wish, "address": drawn_address(random)}
    wanted = copied(database)
    if database[order]["customer"] == customer and database[order]["status"] == ALLOWED[wish]:
        wanted[order] |= changed(wish, about["address"])
    return Task(id, WISHES[wish], wanted, {"orders": database, **about})


def drawn_address(random: Random) -> str:
    return f"{random.randint(1, 99)} {random.choice(STREETS)}"


def changed(wish: str, address: str) -> dict[str, str]:
    """The fields of an order that change when the request is fulfilled."""
    return {
        "cancel": {"status": "cancelled"},
        "refund": {"status": "refunded"},
        "move": {"address": address},
    }[wish]


def copied(orders: Orders) -> Orders:
    return {number: dict(order) for number, order in orders.items()}


class Desk:
    """The tools of one conversation, and the orders that they change. `unseen` is True if an order
    was changed without being looked up first."""

    def __init__(self, orders: Orders) -> None:
        self.orders = copied(orders)
        self.unseen = False
        self._seen: set[str] = set()

    @property
    def tools(self) -> list[Callable[..., Any]]:
        return [self.order, self.cancel, self.refund, self.change_address]

    async def order(self, id: str) -> dict[str, str]:
        """Looks up an order: whose it is, its status and its address.

        Args:
            id: Number of the order.
        """
        found = self.find(id)
        self._seen.add(id)
        return found

    async def cancel(self, id: str) -> str:
        """Cancels an order.

        Args:
            id: Number of the order.
        """
        return self.change(id, "cancel")

    async def refund(self, id: str) -> str:
        """Gives the money for an order back.

        Args:
            id: Number of the order.
        """
        return self.change(id, "refund")

    async def change_address(self, id: str, address: str) -> str:
        """Changes the address to which an order is sent.

        Args:
            id: Number of the order.
            address: The new one.
        """
        return self.change(id, "move", address)

    def change(self, id: str, wish: str, address: str = "") -> str:
        self.find(id).update(changed(wish, address))
        self.unseen |= id not in self._seen
        return "Done."

    def find(self, id: str) -> dict[str, str]:
        if id not in self.orders:
            raise ToolError(f"There is no order {id!r}.")
        return self.orders[id]


class Customer(Protocol):
    async def say(self, heard: str | None) -> str | None:
        """Returns the customer's reply, or the opening if `heard` is None; None once they have left."""
        ...


@gin.configurable(module="customer_service")
class Scripted:
    """A customer who states the request, then their number and the order, and then accepts any
    outcome."""

    def __init__(self, task: Task) -> None:
        about = task.metadata
        details = f"I am customer {about['customer']}, the order is {about['order']}."
        moved = f" My address is now {about['address']}." if about["wish"] == "move" else ""
        self._lines = [WISHES[about["wish"]], details + moved]

    async def say(self, heard: str | None) -> str | None:
        return self._lines.pop(0) if self._lines else None


@gin.configurable(module="customer_service")
class Simulated:
    """A customer played by a model behind an OpenAI-compatible endpoint.

    Args:
        task: The conversation's task.
        base_url: Address of the endpoint.
        model: Name of the model there.
        key_variable: Environment variable with the API key, if one is needed.
        temperature: Sampling temperature of the customer.
    """

    def __init__(
        self,
        task: Task,
        base_url: str,
        model: str,
        key_variable: str = "CUSTOMER_API_KEY",
        temperature: float = 0.7,
    ) -> None:
        about = task.metadata
        wish = WISHES[about["wish"]] + (
            f" Your new address is {about['address']}." if about["wish"] == "move" else ""
        )
        told = CUSTOMER.format(
            customer=about["customer"], order=about["order"], wish=wish, over=OVER
        )
        self._messages: list[Any] = [{"role": "system", "content": told}]
        self._endpoint = {"base_url": base_url, "api_key": os.environ.get(key_variable, "none")}
        self._parameters: dict[str, Any] = {"model": model, "temperature": temperature}

    async def say(self, heard: str | None) -> str | None:
        from openai import AsyncOpenAI

        self._messages.append({"role": "user", "content": heard or "Hello, what can I do for you?"})
        async with AsyncOpenAI(**self._endpoint) as client:
            answer = await client.chat.completions.create(
                messages=self._messages, **self._parameters
            )
        said = answer.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": said})
        return None if OVER in said else said


@gin.configurable(module="customer_service")
async def serve(
    task: Task,
    base_url: str,
    api_key: str,
    customer: Callable[[Task], Customer] = Scripted,
    replies: int = 12,
    instructed: bool = False,
) -> float:
    """The agent, for `agent.solve`: talks to the customer and calls tools with the official OpenAI
    client. Returns the reward.

    Args:
        task: The conversation's task.
        base_url: Address of the session.
        api_key: Key of the session.
        customer: Creates the customer.
        replies: Maximum number of the model's replies, including tool calls.
        instructed: Adds the policy as a system message, for models not trained on the task.
    """
    from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

    desk, caller = Desk(orders_of(task)), customer(task)
    toolbox = Toolbox(desk.tools)
    messages: list[Any] = [{"role": "system", "content": POLICY}] if instructed else []
    messages.append({"role": "user", "content": await caller.say(None)})
    schemas: list[Any] = list(toolbox.schemas)
    # the run's own address has no TLS; loading certificates takes 20 ms
    here = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=here) as client:
        for _ in range(replies):
            try:
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, tools=schemas
                )
            except BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                break  # the conversation is too long: the changes so far count
            reply = answer.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if reply.tool_calls:
                messages += [await called(toolbox, call) for call in reply.tool_calls]
            elif (said := await caller.say(reply.content)) is not None:
                messages.append({"role": "user", "content": said})
            else:
                break
    return await reward_of(task, desk)


def orders_of(task: Task) -> Orders:
    """The orders that a conversation begins with."""
    orders: Orders = task.metadata["world" if "verifier" in task.metadata else "orders"]
    return orders


async def reward_of(task: Task, desk: Desk) -> float:
    """The reward of what became of the orders: by the task's own program, if it has one."""
    if desk.unseen:
        return 0.0
    if "verifier" in task.metadata:
        return await verified(sandbox_here(), task, desk.orders)
    return float(desk.orders == task.answer)


def sandbox_here() -> Sandbox:
    """The sandbox of the running event loop, which ends with the process."""
    return _sandboxes.setdefault(asyncio.get_running_loop(), Sandbox(workers=2))


_sandboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


async def called(toolbox: Toolbox, call: Any) -> Message:
    """A message with the tool's result, or with the error in the call."""
    said = await toolbox.call(call.function.name, call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": said}
