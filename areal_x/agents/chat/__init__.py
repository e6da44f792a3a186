"""Conversations, without any HTTP: from messages to messages, and to trajectories, token for token.

An agent or a workflow requests completions (`ChatRequest`), a `ChatEngine` answers each from the
engine (`ChatAnswer`), and the completions (`Call`) become trajectories. Text is tokenised once,
when it comes from outside; tokens that the policy generated are kept as they are.
"""
