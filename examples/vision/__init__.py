"""Counting the squares of a picture: a model that sees, its images drawn here."""
