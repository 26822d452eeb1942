"""The face of the product: command line, pipeline, review and report."""

__version__ = "0.1.0"
