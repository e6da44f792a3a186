"""Grade-school mathematics: an instruction-tuned model learns to reason to the correct answer."""
