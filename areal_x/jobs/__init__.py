"""The jobs that `areal-x launch` writes."""
