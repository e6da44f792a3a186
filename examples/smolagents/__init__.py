"""Products by an unmodified smolagents agent with one tool."""
