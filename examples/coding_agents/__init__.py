"""Capitals by command-line coding agents, as they are published: Claude Code, Codex, opencode and
mini-swe-agent."""
