"""Compiled attention, imported only where Triton is (the operation in attention.py decides), and the probe that compares it."""
