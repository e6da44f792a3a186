"""Countdown problems proposed by the policy itself: a search checks that they can be solved, and the
policy's answers measure their difficulty."""
