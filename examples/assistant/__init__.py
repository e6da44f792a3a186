"""An assistant trained on its users' ratings while they use it."""
