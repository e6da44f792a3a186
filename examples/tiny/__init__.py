"""Shared code of the examples' small models: architecture, tokenizer, and the cached supervised
warm start."""
