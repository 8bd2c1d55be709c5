"""Triton programs of the layer operations. Imported only where Triton can launch; operation.py decides."""
