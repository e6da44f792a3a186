"""The letters that follow one: the smallest run that learns something, built in Python."""
