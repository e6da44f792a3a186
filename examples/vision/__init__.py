"""Counting squares in pictures with a small vision-language model."""
