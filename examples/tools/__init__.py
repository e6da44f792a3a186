"""Products with a Python tool: a small model that cannot multiply learns by reinforcement to call
it."""
