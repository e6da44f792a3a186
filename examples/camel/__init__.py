"""Products by a CAMEL agent with one tool, which knows nothing of being trained."""
