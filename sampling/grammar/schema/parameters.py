"""The grammar of arguments as Qwen3-Coder writes them: `<parameter=NAME>`, a value, `</parameter>`, each on its own line.

A value that can only be a string is written without quotes and escapes, any other value as JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stepgraph.sampling.grammar.constraints.unsupported import reject
from stepgraph.sampling.grammar.schema.automata import is_empty
from stepgraph.sampling.grammar.schema.forms import NO_VALUE, Expr, Form, Object
from stepgraph.sampling.grammar.schema.grammar import GrammarWriter, schema_grammar, write_schema
from stepgraph.sampling.grammar.schema.language import ANY_TEXT, both, cat, complement, words
from stepgraph.sampling.grammar.schema.normalise import Normaliser
from stepgraph.sampling.grammar.schema.options import Options
from stepgraph.sampling.grammar.schema.reader import Document, parse_json
from stepgraph.sampling.grammar.schema.spelling import literal

PARAMETER_END = "\n</parameter>"
_WITHOUT_END = complement(cat(ANY_TEXT, words([PARAMETER_END]), ANY_TEXT))
_NAME = re.compile(r"[^<>\n]+")


def parameters_grammar(schema: Any, options: Options, prefix: str = "") -> str:
    """The rules of the grammar, as in `schema_grammar`. UnsupportedError if the schema does not allow an object."""
    return schema_grammar(schema, options, prefix, _ParameterWriter)


def text_parameters(schema: Any) -> frozenset[str]:
    """The names of the parameters whose values are written without quotes and escapes."""
    normaliser = Normaliser(Document(parse_json(json.dumps(schema, default=float))), Options.unknown_formats)  # float: of a Decimal
    styles = write_schema(normaliser, Options(), "", _ParameterWriter).is_text_by_name
    return frozenset(name for name, is_text in styles.items() if is_text)


class _ParameterWriter(GrammarWriter):
    def root(self, part: Expr) -> str:
        self.is_text_by_name = dict[str, bool]()  # name -> whether the value is written without quotes
        cases = [self._parameters(item) for item in self.form(part).objects if self._object_has_value(item)]
        if not cases:
            reject("#", "type", 'does not allow an object, and parameters are written from an object; write type "object"')
        return " | ".join(cases)

    def _parameters(self, item: Object) -> str:
        declared = [(name, value) for name, value in item.declared if self.is_satisfiable(value)]
        counts = item.low > len(item.required) or (item.high is not None and item.high < len(declared))
        if counts or item.witnesses or item.required - {name for name, _ in declared}:
            reason = "has counts, or required names that are not declared, which parameters cannot express; write optional or required ones"
            reject("#", "properties", reason)
        texts = list[str]()
        for name, value in declared:
            if not _NAME.fullmatch(name):
                reason = f"has the name {name!r:.60}, which cannot be written as a parameter; write one without <, > and line breaks"
                reject("#", "properties", reason)
            form = self.form(value)
            is_text = form == NO_VALUE._replace(strings=form.strings) and not is_empty(form.strings.exact)
            if self.is_text_by_name.setdefault(name, is_text) != is_text:
                reject("#", "properties", f"has {name!r:.60}, a string in some cases only, which parameters cannot express; write one case")
            value_text = self._unquoted_text(form) if is_text else self.value(value)
            text = f"{literal(f'<parameter={name}>{chr(10)}')} {value_text} {literal(f'{PARAMETER_END}{chr(10)}')}"
            texts.append(text if name in item.required else f"({text})?")
        return " ".join(texts) or '""'

    def _unquoted_text(self, form: Form) -> str:
        term = self.narrowed(both(self.strings(form), _WITHOUT_END))
        if is_empty(term):
            reject("#", "schema", f"accepts no string without {PARAMETER_END!r}; write a value without it")
        return self._language_writer.body(term, in_string=False)
