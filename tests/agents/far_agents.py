"""Agents that workers of tests run, in processes of their own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from areal_x.agents.client import ask

SEEN = "FOLDER_OF_A_TEST"  # variable with the folder where `hanging` leaves its marks


async def asking(task, base_url, api_key):
    """Knows of no training and of no network: an unmodified client."""
    from openai import AsyncOpenAI  # takes a second, which `hanging` need not

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
    return float(bool(answer.choices[0].message.content) and task.answer == task.metadata["wanted"])


async def hanging(task, base_url, api_key):
    """Calls the model once, and never comes to an end."""
    body = {"model": "policy", "messages": [{"role": "user", "content": task.prompt}]}
    await asyncio.to_thread(ask, f"{base_url}/chat/completions", api_key, body)
    (Path(os.environ[SEEN]) / task.id).write_text(base_url)
    await asyncio.sleep(3600)
