"""Products by a Python tool: a small model that cannot multiply learns by reinforcement to have it
done."""
