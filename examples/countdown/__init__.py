"""Countdown: make the target of a few numbers, each used at most once."""
