"""Worked addition: a small model learns by reinforcement to carry, which its demonstrations mostly
omit."""
