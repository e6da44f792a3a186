"""Countdown problems that the policy makes up itself: a search says which can be solved, its own
answers how hard they are."""
