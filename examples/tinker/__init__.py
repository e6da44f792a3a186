"""A server of Tinker clients, sampled by vLLM, and a tiny world for the recipes of the cookbook."""
