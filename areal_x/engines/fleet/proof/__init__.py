"""Proves that a server computes with the weights that the trainer published.

sums      a fingerprint of a tensor, or of a part of one: the trainer and the server's workers compute it
claims    the sums of what the trainer publishes, written beside the staged files
judge     compares what a server's workers report with the claims
prover    asks a server, and raises WeightsDiffer
"""
