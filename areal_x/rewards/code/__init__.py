"""The reward of a program: its tests, run in the sandbox."""
