"""Compiled attention. Imported only where Triton is: the operation in attention.py decides."""
