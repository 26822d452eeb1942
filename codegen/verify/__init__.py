"""The proofs that a generated kernel must pass before anything may use it.

A candidate runs in its own process and only hands back numbers (`candidate`); the harness holds the
references and computes the verdict (`judge`); a third process compiles for devices that are not
here (`cross_compile`). `harness` starts them and turns what they say into gates.
"""
