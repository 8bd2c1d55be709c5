"""Triton programs of the stages. Imported only where Triton can launch; operation.py decides."""
