"""Conversations, without any HTTP: messages in, messages out, and what of them is trained on, token
for token.

An agent or a workflow asks for completions (`Ask`), a `Speaker` answers each from the engine
(`Answer`), and what was generated (`Call`) becomes trajectories. Tokens are made from text once,
when the text comes from outside; what the policy generated stays as the tokens that it generated.
"""
