"""Products by an unmodified CAMEL agent with one tool."""
