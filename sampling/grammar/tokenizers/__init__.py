"""From a tokenizer to the table that grammars need: which bytes each id stands for, which ids are no text, which of them end it.

`Vocabulary.from_tokenizer_json`, `from_tokenizer`, `from_tiktoken` and `from_gguf` are the doors. Encoding text is left to the
tokenizer's own library; a tokenizer whose tokens are spelled by their neighbours is refused by name.
"""
