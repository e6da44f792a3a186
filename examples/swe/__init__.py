"""Small issues in a git repository, worked on by an unmodified mini-swe-agent."""
