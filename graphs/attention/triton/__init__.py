"""Triton programs of the attention operations. Imported only where Triton can launch; operation.py decides."""
