"""One folder per family: `__init__` holds the contract and the family, `reference` the plain-torch implementation."""
