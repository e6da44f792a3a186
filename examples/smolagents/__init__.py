"""Products by an agent of smolagents with one tool, which knows nothing of being trained."""
