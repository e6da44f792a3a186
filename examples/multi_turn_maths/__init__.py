"""Mathematics in several attempts: a wrong answer gets feedback, and a later success counts
less."""
