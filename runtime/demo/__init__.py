"""The embedded default: a small instruct model from a wheel, a draft that was trained for it, and things to ask of the pair."""
