"""Tuning: which launches of a family's kernels are fastest on a device.

A candidate is a `Tile`: the template is rendered with it, proved forward and backward by the
harness, and only then timed (`search`, `bench`, `timing`). What is found is a record
(`records`): shipped for some devices under `codegen/tuned/`, kept in the user's cache folder for
the rest, and served to every shape near it. Rendered modules hold no autotuner.
"""
