"""Which modules of a model are experts."""

from analyzers.experts import experts_of

__all__ = ["experts_of"]
