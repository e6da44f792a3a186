"""Small jobs in a shell, judged by tests that the model does not see."""
