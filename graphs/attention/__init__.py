"""Paged attention: the operation, its implementations, and the choice between them, for which a probe compares them."""
