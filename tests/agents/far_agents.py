"""Agents that workers of tests run, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from openai import AsyncOpenAI

SEEN = "FOLDER_OF_A_TEST"  # variable with the folder where `hanging` leaves its marks


async def asking(task, base_url, api_key):
    """Knows of no training and of no network: an unmodified client."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
    return float(bool(answer.choices[0].message.content) and task.answer == task.metadata["wanted"])


async def hanging(task, base_url, api_key):
    """Calls the model once, and never comes to an end."""
    await asking(task, base_url, api_key)
    (Path(os.environ[SEEN]) / task.id).write_text(base_url)
    await asyncio.sleep(3600)


def blocking(task, base_url, api_key):
    time.sleep(3600)
