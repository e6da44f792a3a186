"""What every backend must do, tested through the contract alone (areal_x.protocols).

    python -m areal_x.testing.conformance --backend NAME

NAME is the name of an entry point of the group `areal_x.backends`; without the option, or with
`pytest --pyargs areal_x.testing.conformance`, every installed backend is tested. Further arguments
are pytest's. Models are tiny, random and written here; expected numbers come from
areal_x.testing.reference, in numpy. pytest and hypothesis are imported here only.
"""
