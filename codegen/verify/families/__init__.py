"""What each family of operators tells the harness: one module a family, named after it.

A module defines a subclass of `codegen.verify.cases.Case` and a function
`cases(shape: Shape) -> list[Case]`; everything else (poison, guard bands, running twice, causality,
rows of a batch, order of documents, carried states, torch's checks, compilers) is shared.
"""
