"""Bugs planted on purpose, each modelled on one that published reinforcement-learning code had, and the tests that must see it.

    make mutants                                    # all of them
    python -m tests.mutants [WORD …] [--workers 2]  # those whose names contain a word

A mutant is a replacement of one piece of text in one file. It is applied to a copy of the code, and the tests that it names
are run there: one of them must fail.
"""
