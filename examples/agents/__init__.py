"""The arithmetic task by agents that know nothing of being trained: programs of the OpenAI client, the
OpenAI Agents SDK, and JavaScript."""
