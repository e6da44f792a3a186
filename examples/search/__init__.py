"""Questions about invented people and towns, answered by searching and reading a small library."""
