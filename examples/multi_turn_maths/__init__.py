"""Mathematics in several tries: a wrong answer is followed by feedback, and a later success counts
less."""
