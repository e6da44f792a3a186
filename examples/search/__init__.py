"""Questions about a small library of invented people and towns, which the model searches and
reads."""
