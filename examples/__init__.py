"""Experiments, each a gin file and the task it trains on."""
