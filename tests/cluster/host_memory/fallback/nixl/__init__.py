"""Stands in for NIXL where it is not installed (tests/cluster/host_memory/sitecustomize.py)."""
