"""Containers: machines of their own for an episode, wherever they run (docs/sandbox.md#containers)."""
