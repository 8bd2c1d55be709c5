"""The demonstration: a small instruct model from a wheel, a draft trained for it, and prompts."""
