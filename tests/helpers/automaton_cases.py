"""Grammars and a vocabulary with which automata are compared with xgrammar, and a vocabulary without tokens of single bytes."""

from __future__ import annotations

from stepgraph.sampling.grammar import Constraint, Vocabulary

# All single bytes, so that every text can be spelled; tokens that begin or end in the middle of a string or a character; long runs.
PIECES = (b'{"', b'":', b'": ', b'", "', b'"}', b"}]", b"]}", b"[[", b", ", b"true", b"null", b"12", b"aa", b"aaaa", b"ab", b'a"', b'a",')
PARTS = (
    "é".encode()[:1],
    "é".encode()[1:] + b"x",
    "日本".encode(),
    "日".encode()[:2],
    b"a" * 8,
    b"\\n",
    b"\\u00",
    b"))",
    b"((",
    b"<t>",
    b"t>1",
)
VOCABULARY = Vocabulary(
    [*(bytes([code]) for code in range(256)), *PIECES, *PARTS, b"", b"<control>", b"<stop>"], [286], control_token_ids=[285]
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "tags"],
}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["value", "below"],
        }
    },
}
COUNTED = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 20, "maxLength": 40},
        "list": {"type": "array", "items": {"type": "string", "maxLength": 22}, "maxItems": 14},
    },
    "required": ["text", "list"],
}
NAMES = {
    "type": "object",
    "properties": {"aa": {"type": "integer"}, "aab": {"type": "string", "maxLength": 7}},
    "additionalProperties": {"type": "string"},
}
CONSTRAINTS = {
    "schema": Constraint.json_schema(PERSON),
    "any JSON": Constraint.json_object(),
    "blanks": Constraint.json_schema(PERSON, any_whitespace=True),
    "recursive schema": Constraint.json_schema(TREE),
    "counters": Constraint.json_schema(COUNTED),
    "enum": Constraint.json_schema({"enum": ["a", "aa", 12, None, {"a": [1]}, "é"]}),
    "choice": Constraint.choice(["a", "aaaa", "ab", "日本"]),
    "regex": Constraint.regex(r"(ab?|a{2,4}\.)*[^a-z]é?"),
    "long counter": Constraint.regex("[ab]{30,150}é?"),
    "two counters": Constraint.regex("(a{3,24}b){12,30}"),
    "two loops with one counter": Constraint.regex("a[bc]{30,90}d|a[bd]{30,90}c"),
    "two loops with one counter, of which one can end": Constraint.regex("x(ab|cd){40}e|x(ab|ce){40}f"),
    "nested loops in two alternatives": Constraint.regex("(a{24}b){40}c|(a{24}b){40}d"),
    "two loops that begin apart": Constraint.regex("a[bc]{60}d|ab[bc]{60}e"),
    "two loops of different steps": Constraint.regex("(a|bb){60}c|(b|aa){60}d"),
    "two loops of different counts": Constraint.regex("a[bc]{0,60}d|a[bc]{0,70}e"),
    "counter that overlaps its end": Constraint.regex("[ab]{0,60}a{0,60}c"),
    "characters of several lengths": Constraint.regex("[¢-𐍈]{1,3}"),
    "words of bounded length": Constraint.regex("[a-z0-9]{2,9}(-[A-Z]{0,3}[a-z]*)?"),
    "names beside any other": Constraint.json_schema(NAMES),
    "right recursion": Constraint.ebnf('root ::= "a" root | "b"'),
    "left recursion": Constraint.ebnf('root ::= root "a" | "b"'),
    "brackets": Constraint.ebnf('root ::= "(" root ")" | "[" list "]" | "a"\nlist ::= root | root "," list'),
    "left recursion with a bracket of its own": Constraint.ebnf('root ::= root "+" "x" | "(" root ")" | "x"'),
    "expression": Constraint.ebnf('root ::= term | root "+" term\nterm ::= "(" root ")" | [0-9]+ | "(" ")"'),
    "recursion after a bracket": Constraint.ebnf('root ::= "[" root "]" root | "(" root ")" | "[]" | "a"'),
    "recursion before a bracket": Constraint.ebnf('root ::= root "[" list "]" | "a"\nlist ::= root | root "," list'),
    "calls in a row": Constraint.ebnf('root ::= "f(" root "," root ")" root | "b" root | ""'),
    "tags": Constraint.structural_tag(
        {"triggers": ["<t>"], "structures": [{"begin": "<t>", "schema": {"type": "integer"}, "end": "</t>"}]}
    ),
}
