"""Small programs, verified by tests: the model unlearns typical mistakes of beginners."""
