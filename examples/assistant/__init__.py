"""An assistant that learns from the thumbs of those who use it, while they use it."""
