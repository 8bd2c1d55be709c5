"""Triton programs of the sampling operations. Imported only where Triton can launch; operation.py decides."""
