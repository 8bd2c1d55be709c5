"""Readers of tokenizer files and objects: the bytes of each token id, the ids without text, and the ids that end a text.

Each reader returns a `TokenTable`; `Vocabulary.from_tokenizer_json`, `from_tokenizer`, `from_tiktoken` and `from_gguf` call them.
Encoding text is left to the tokenizer's own library. A tokenizer whose token bytes depend on adjacent tokens is rejected.
"""
