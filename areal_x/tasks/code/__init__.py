"""Programming tasks: their tests, and the files of LiveCodeBench, APPS and MBPP."""
