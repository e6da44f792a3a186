"""Small jobs in a shell, scored by hidden tests."""
