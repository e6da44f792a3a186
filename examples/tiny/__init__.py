"""What the small models of the examples share: their shape, their tokenizer, and how each is
supervised once and kept."""
