"""The canonical form of each schema of a document, from all its keywords."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from stepgraph.sampling.grammar.constraints.unsupported import Unsupported, UnsupportedError, reject
from stepgraph.sampling.grammar.schema import formats, language
from stepgraph.sampling.grammar.schema.automata import TooComplexError, is_empty
from stepgraph.sampling.grammar.schema.combine import (
    complement_of,
    meet,
    meet_arrays,
    meet_keys,
    meet_objects,
    possible_array,
    possible_object,
)
from stepgraph.sampling.grammar.schema.forms import (
    ANY_VALUE,
    NEVER,
    NO_VALUE,
    TRUE,
    Array,
    Contains,
    Expr,
    Form,
    KeyClass,
    Object,
    Strings,
    all_of,
    exactly,
    expr,
    join,
)
from stepgraph.sampling.grammar.schema.language import ANY_CHAR, ANY_TEXT, NOTHING, Term, complement, either, matches, repeat, words
from stepgraph.sampling.grammar.schema.numbers import Numbers
from stepgraph.sampling.grammar.schema.patterns import PatternError, full, search
from stepgraph.sampling.grammar.schema.reader import NUMBER_KEYWORDS, Document, Node, clip_json, fraction, pointer, refuse_format

MAX_FORMS = 20_000  # forms of schemas and conjunctions of schemas
MAX_PAIRS = 30_000  # intersections of alternatives

_ARRAY_KEYWORDS = frozenset("items prefixItems minItems maxItems uniqueItems contains".split())
_OBJECT_KEYWORDS = frozenset("properties patternProperties additionalProperties required minProperties maxProperties".split())
_TEXT_KEYWORDS = ("pattern", "patternProperties", "propertyNames", "format")
_OLDER_NAMES = {"host-name": "hostname", "ip-address": "ipv4"}
_IN_PLACE_KEYWORDS = frozenset("$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if dependencies dependentSchemas extends".split())
_FORM_OF_TYPE = {
    "null": NO_VALUE._replace(null=True),
    "boolean": NO_VALUE._replace(booleans=ANY_VALUE.booleans),
    "number": NO_VALUE._replace(numbers=ANY_VALUE.numbers),
    "integer": NO_VALUE._replace(numbers=(Numbers(multiple=Fraction(1)),)),
    "string": NO_VALUE._replace(strings=ANY_VALUE.strings),
    "array": NO_VALUE._replace(arrays=ANY_VALUE.arrays),
    "object": NO_VALUE._replace(objects=ANY_VALUE.objects),
}


class Normaliser:
    """Computes forms on demand. A form contains expressions, not forms, for the values inside, so recursive schemas need no recursion."""

    def __init__(self, document: Document, unknown_formats: Literal["annotation", "refuse"] = "annotation") -> None:
        self.document, self._unknown_formats = document, unknown_formats
        self.conflicts = list[tuple[str, tuple[str, ...]]]()  # places of schemas whose parts, or two other schemas, contradict each other
        self.narrowed = dict[Unsupported, None]()  # parts not all of whose texts are generated
        self._forms: dict[Expr, Form] = {TRUE: ANY_VALUE, NEVER: NO_VALUE}
        self._in_progress = dict[Expr, None]()  # being computed
        self._simplified = dict[Expr, Expr]()
        self._num_pairs = 0
        self._canonical = dict[Form, Expr]()

    def form(self, part: Expr) -> Form:
        """The form of an expression; UnsupportedError if it cannot be enforced."""
        found = self._forms.get(part)
        if found is not None:
            return found
        node = part[-1].node
        if part in self._in_progress:
            reject(node.where, "$ref", "refers to itself and to nothing else; refer to a schema with other keywords")
        if len(self._forms) > MAX_FORMS:
            reject(node.where, "schema", f"takes more than {MAX_FORMS} combinations of schemas; write fewer alternatives")
        self._in_progress[part] = None
        try:
            if len(part) > 1:
                found = self._meet_all([self.form((literal,)) for literal in part], node.where, part)
            elif part[0].positive:
                found = self._types(node, "type") if node.keywords.keys() == {"type"} else self._form_of_node(node)
            else:
                found = complement_of(self.form(expr(node)), self.simplify, node.where)
        except TooComplexError as error:
            reject(node.where, text_keyword(node), str(error))
        finally:
            del self._in_progress[part]
        self._forms[part] = found
        return found

    def simplify(self, part: Expr) -> Expr:
        """An equivalent expression, the same one for equal forms; NEVER if it is certain that no value satisfies it. Contradictions between
        schemas are found, not those inside one schema."""
        if len(part) < 2 or part in self._in_progress:
            return part
        if part not in self._simplified:
            self._simplified[part] = part  # for recursion
            with contextlib.suppress(UnsupportedError):  # reported when the expression is written
                form = self.form(part)
                same = next(((literal,) for literal in part if self._forms.get((literal,)) == form), part)
                self._simplified[part] = NEVER if form.is_nothing else self._canonical.setdefault(form, same)
        return self._simplified[part]

    def meet(self, left: Form, right: Form, where: str) -> Form:
        self._num_pairs += len(left.arrays) * len(right.arrays) + len(left.objects) * len(right.objects)
        if self._num_pairs > MAX_PAIRS:
            reject(where, "schema", f"takes more than {MAX_PAIRS} intersections of alternatives; write fewer alternatives")
        return meet(left, right, self.simplify, where, self.document.has_unevaluated)

    def _meet_all(self, forms: list[Form], at: str, part: Expr = ()) -> Form:
        """The intersection of the forms at a place, or of the literals of an expression. Contradictions are recorded."""
        found = forms[0] if forms else ANY_VALUE
        for index, form in enumerate(forms[1:], 1):
            met = self.meet(found, form, at)
            if met.is_nothing and not found.is_nothing and not form.is_nothing:
                conflicting = (part[index - 1], part[index]) if part else ()
                self.conflicts.append((at, tuple(f"{'' if one.positive else 'not '}{one.node.where}" for one in conflicting)))
            found = met
        return found

    def _form_of_node(self, node: Node) -> Form:
        keywords, child, where = node.keywords, self.document.child, node.where
        if not keywords:
            return NO_VALUE if node.schema is False else ANY_VALUE
        parts = list(self._type_keywords(node))  # (keyword, form)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in keywords:
                parts.append((keyword, self.form(expr(self.document.target(node, keyword)))))
        for keyword in ("allOf", "extends"):
            value = keywords.get(keyword, [])
            schemas = [child(node, keyword, index) for index in range(len(value))] if isinstance(value, list) else [child(node, keyword)]
            parts += [(keyword, self.form(expr(part))) for part in schemas]
        if "not" in keywords:
            parts.append(("not", self.form(expr(child(node, "not"), False))))
        if "disallow" in keywords:
            parts.append(("disallow", complement_of(self._types(node, "disallow"), self.simplify, where)))
        parts += self._dependent(node)
        if "anyOf" in keywords:
            parts.append(("anyOf", self._any_of([expr(child(node, "anyOf", index)) for index in range(len(keywords["anyOf"]))])))
        if "oneOf" in keywords:
            parts.append(("oneOf", self._exactly_one([child(node, "oneOf", index) for index in range(len(keywords["oneOf"]))])))
        if "if" in keywords and ({"then", "else"} & keywords.keys() or self.document.has_unevaluated):
            parts.append(("if", self._conditional(node)))
        order = {keyword: index for index, keyword in enumerate(node.schema)}  # also determines the order of properties
        parts.sort(key=lambda part: order.get(part[0], 0))
        parts.sort(key=lambda part: not any(item.closable for item in part[1].objects))  # names that are only required come last
        found = self._meet_all([form for _, form in parts], where)
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in keywords:
                found = self._restrict_unevaluated(found, node, keyword)
        return found

    def _any_of(self, parts: list[Expr], num_conflicts: int | None = None) -> Form:
        """The union of these expressions. If it has values, the contradictions that were found in single expressions are dropped."""
        num_conflicts = len(self.conflicts) if num_conflicts is None else num_conflicts
        found = join(*map(self.form, parts), for_unevaluated=self.document.has_unevaluated)
        if not found.is_nothing:
            del self.conflicts[num_conflicts:]
        return found

    def _conditional(self, node: Node) -> Form:
        condition, cases = self.document.child(node, "if"), list[Expr]()
        for positive, keyword in ((True, "then"), (False, "else")):
            consequence = expr(self.document.child(node, keyword)) if keyword in node.keywords else TRUE
            cases.append(all_of(expr(condition, positive), consequence))
        return self._any_of(cases)

    def _exactly_one(self, branches: list[Node]) -> Form:
        """Each branch without the other branches with which it has values in common."""
        parts, num_conflicts = [expr(branch) for branch in branches], len(self.conflicts)
        texts = [self._texts_by_name(branch) for branch in branches]
        cases = list[Expr]()
        for index, part in enumerate(parts):
            overlapping = [
                expr(branch, False)
                for other, branch in enumerate(branches)
                if other != index
                and not any(found.isdisjoint(texts[other][name]) for name, found in texts[index].items() if name in texts[other])
                and (part == parts[other] or self.simplify(all_of(part, parts[other])) != NEVER)
            ]
            cases.append(all_of(part, *overlapping))
        return self._any_of(cases, num_conflicts)

    def _texts_by_name(self, branch: Node) -> dict[str | None, frozenset[str]]:
        """The texts that a branch lists: its values (None), and those of required properties if it allows only objects."""
        node = self.document.target(branch, "$ref") if "$ref" in branch.keywords else branch
        names, properties = node.keywords.get("required", []), node.keywords.get("properties", {})
        if node.keywords.get("type") != "object" or not isinstance(names, list) or node.schema.get("nullable") is True:
            names = []
        found = {
            None: _listed_texts(node),
            **{name: _listed_texts(self.document.child(node, "properties", name)) for name in names if name in properties},
        }
        return {name: texts for name, texts in found.items() if texts}

    def _type_keywords(self, node: Node) -> Iterator[tuple[str, Form]]:
        """The keywords about one type, and lists of values."""
        keywords = node.keywords
        if "type" in keywords:
            yield "type", self._types(node, "type")
        for keyword in ("enum", "const"):
            if keyword in keywords:
                values = keywords["enum"] if keyword == "enum" else [keywords["const"]]
                yield keyword, self._values(values, node.where, keyword)
        if not keywords.keys().isdisjoint(NUMBER_KEYWORDS):
            yield "minimum", self._numbers(node)
        strings = [keywords[word] for word in ("minLength", "maxLength") if word in keywords]
        if strings:
            term = repeat(ANY_CHAR, keywords.get("minLength", 0), keywords.get("maxLength"))
            yield "minLength", ANY_VALUE._replace(strings=exactly(term))
        if "pattern" in keywords:
            yield "pattern", ANY_VALUE._replace(strings=self._pattern(node, "pattern", keywords["pattern"]))
        if "format" in keywords and (texts := self._format(node, keywords["format"])):
            yield "format", ANY_VALUE._replace(strings=texts)
        if not _ARRAY_KEYWORDS.isdisjoint(keywords):
            array = possible_array(self._array(node), self.simplify)
            yield "items", ANY_VALUE._replace(arrays=(array,) if array else ())
        if not _OBJECT_KEYWORDS.isdisjoint(keywords) or self._required_children(node):
            item = possible_object(self._object(node), self.simplify)
            yield "properties", ANY_VALUE._replace(objects=(item,) if item else ())
        if "propertyNames" in keywords:
            names, _, most = self.form(expr(self.document.child(node, "propertyNames"))).strings
            item = replace(_object_of_names(names), superset=None if most is names else _object_of_names(most))
            yield "propertyNames", ANY_VALUE._replace(objects=(item,))

    def _types(self, node: Node, keyword: str) -> Form:
        value, found, child = node.schema[keyword], list[Form](), self.document.child
        for index, name in enumerate(self.document.types(node, keyword)):
            if isinstance(name, dict):
                found.append(self.form(expr(child(node, keyword, index) if isinstance(value, list) else child(node, keyword))))
            else:
                found = [ANY_VALUE] if name == "any" else [*found, _FORM_OF_TYPE[name]]
        form = found[0] if len(found) == 1 else join(*found)
        return form._replace(null=True) if node.schema.get("nullable") is True and keyword == "type" else form

    def _values(self, values: list[Any], at: str, keyword: str) -> Form:
        """Exactly these values."""
        where = pointer(at, keyword)
        texts, numbers, arrays, objects = list[str](), list[Numbers](), list[Array](), list[Object]()
        others = {value for value in values if value is None or isinstance(value, bool)}
        for value in values:
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, (int, Decimal)) and not isinstance(value, bool):
                numbers.append(Numbers(exact := fraction(value, at, keyword), exact))
            elif isinstance(value, list):
                items = tuple(expr(self.document.constant(item, where)) for item in value)
                arrays.append(Array(items, NEVER, len(items), len(items)))
            elif isinstance(value, dict):
                declared = tuple((name, expr(self.document.constant(item, where))) for name, item in value.items())
                objects.append(Object(declared, frozenset(value), (KeyClass(ANY_TEXT, NEVER),), len(value)))
        booleans = frozenset(value for value in others if isinstance(value, bool))
        return Form(None in others, booleans, tuple(dict.fromkeys(numbers)), exactly(words(texts)), tuple(arrays), tuple(objects))

    def _numbers(self, node: Node) -> Form:
        keywords = node.keywords
        found: Numbers | None = Numbers(multiple=keywords.get("multipleOf"))
        for bound in (
            Numbers(low=keywords.get("minimum"), high=keywords.get("maximum")),
            Numbers(keywords.get("exclusiveMinimum"), keywords.get("exclusiveMaximum"), low_open=True, high_open=True),
        ):
            found = found.meet(bound) if found else None
        return ANY_VALUE._replace(numbers=(found,) if found else ())

    def _format(self, node: Node, name: str) -> Strings | None:
        """The texts of a format; None if the format is only an annotation."""
        draft = self.document.draft
        name = _OLDER_NAMES.get(name, name) if draft in (0, 3) else name
        if name == "time" and draft == 3:
            texts = full(formats.OLDER[name])
            return Strings(texts, texts, texts)
        if name in formats.FORMATS:
            if name in formats.NARROWED:
                self.narrowed[Unsupported(node.where, "format", f"{name}: {formats.NARROWED[name]}; write a pattern for others")] = None
            if name == "hostname":
                longest = min(node.keywords.get("maxLength", formats.LONGEST_HOSTNAME), formats.LONGEST_HOSTNAME)
                rule = f"hostname{'7' * (3 <= draft <= 7)}_{longest}"
                texts = language.named_rule(rule, "{0}_fewer", (full(formats.few_hostnames(longest)),), longest) if longest else NOTHING
            elif name == "regex":
                texts = language.named_rule(name, formats.REGEX_RULE, tuple(map(full, (formats.FEW_REGEXES, *formats.REGEX_PARTS))), None)
            else:
                texts = full(formats.FORMATS[name])
            if name.endswith("time"):
                date, time = full(formats.FORMATS["date"]), language.named_rule("time", "{0}_fewer", (full(formats.FORMATS["time"]),), None)
                texts = time if name == "time" else language.named_rule("datetime", "{1} [Tt] {2}", (texts, date, time), None)
            return Strings(texts, texts, full(formats.AT_MOST.get(name, formats.FORMATS[name])))
        if self._unknown_formats == "refuse":
            refuse_format(node)
        return None

    def _pattern(self, node: Node, keyword: str, pattern: str) -> Strings:
        try:
            return Strings(texts := search(pattern), full(pattern), texts)
        except PatternError as error:
            reject(node.where, keyword, str(error))

    def _array(self, node: Node) -> Array:
        keywords, child = node.keywords, self.document.child
        first, others = ("items", "additionalItems") if isinstance(keywords.get("items"), list) else ("prefixItems", "items")
        prefix = tuple(expr(child(node, first, index)) for index in range(len(keywords.get(first, ()))))
        rest, described = (expr(child(node, others)), None) if others in keywords else (TRUE, len(prefix))
        contains = tuple[Contains, ...]()
        if "contains" in keywords:
            contains = (Contains(expr(child(node, "contains")), keywords.get("minContains", 1), keywords.get("maxContains")),)
        unique = keywords.get("uniqueItems", False) and keywords.get("maxItems", 2) > 1
        return Array(prefix, rest, keywords.get("minItems", 0), keywords.get("maxItems"), contains, unique, described)

    def _required_children(self, node: Node) -> list[str]:
        """Draft 3: `required` of a property's own schema."""
        if self.document.draft not in (0, 3):
            return []
        below = node.keywords.get("properties", {})
        return [name for name, schema in below.items() if isinstance(schema, dict) and schema.get("required") is True]

    def _object(self, node: Node) -> Object:
        keywords, child = node.keywords, self.document.child
        classes = [KeyClass(ANY_TEXT, TRUE, True)]
        names = list(keywords.get("properties", {}))
        declared = {name: expr(child(node, "properties", name)) for name in names}
        evaluated = list[Term]([words(names)])
        for pattern in keywords.get("patternProperties", {}):
            value, term = expr(child(node, "patternProperties", pattern)), self._pattern(node, "patternProperties", pattern).exact
            classes = meet_keys(classes, (KeyClass(term, value), KeyClass(complement(term), TRUE, True)))
            declared = {name: all_of(before, value) if matches(term, name) else before for name, before in declared.items()}
            evaluated.append(term)
        additional = expr(child(node, "additionalProperties")) if "additionalProperties" in keywords else None
        if additional is not None:
            evaluated = [ANY_TEXT]
        others = tuple(keys if additional is None or not keys.is_default else KeyClass(keys.names, additional) for keys in classes)
        required = dict.fromkeys((*keywords.get("required", ()), *self._required_children(node)))
        low, high = keywords.get("minProperties", 0), keywords.get("maxProperties")
        found = Object(tuple(declared.items()), frozenset(required), others, low, high, "properties" in keywords, (), either(*evaluated))
        undeclared = ((name, found.value(name)) for name in required if name not in declared)  # in the order of `required`
        return replace(found, declared=(*found.declared, *undeclared))

    def _dependent(self, node: Node) -> Iterator[tuple[str, Form]]:
        """Properties that require others, or a schema of the whole object."""
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, value in node.keywords.get(keyword, {}).items():
                absent = ANY_VALUE._replace(objects=(Object.single(name, NEVER, required=False),))
                names = [value] if isinstance(value, str) else value
                if isinstance(names, list):
                    if not all(isinstance(other, str) for other in names):
                        reject(node.where, keyword, f"got {clip_json(value)}, expected a list of strings")
                    present = NO_VALUE._replace(objects=(_object_requiring([name, *names]),))
                else:
                    below = self.form(expr(self.document.child(node, keyword, name)))
                    present = self.meet(NO_VALUE._replace(objects=(_object_requiring([name]),)), below, node.where)
                yield keyword, join(absent, present)

    def _restrict_unevaluated(self, form: Form, node: Node, keyword: str) -> Form:
        """The alternatives, each with a rule for what its own keywords do not describe. If a value satisfies several alternatives, they
        describe more of it together, so the result accepts only a part of what the schema accepts."""
        alternatives: list[Any] = []
        value = expr(self.document.child(node, keyword))
        cases = form.objects if keyword == "unevaluatedProperties" else form.arrays
        has_contains = keyword == "unevaluatedItems" and any(array.contains for array in form.arrays)
        several = has_contains or (len(cases) > 1 and bool(_IN_PLACE_KEYWORDS & node.keywords.keys()))
        if several:
            reason = "without values of which several alternatives, or contains, each describe a part"
            self.narrowed[Unsupported(node.where, keyword, reason)] = None
        if keyword == "unevaluatedProperties":
            for item in form.objects:
                rest = KeyClass(complement(item.evaluated), value)
                others = tuple(keys for keys in (rest, KeyClass(item.evaluated, TRUE, True)) if not is_empty(keys.names))
                met = meet_objects(item, Object(others=others, superset=Object() if several else None), self.simplify)
                alternatives += [replace(met, evaluated=ANY_TEXT)] if met else []
            return form._replace(objects=tuple(alternatives))
        for array in form.arrays:
            if array.evaluated is not None:
                limit = Array(tuple(TRUE for _ in range(array.evaluated)), value, superset=Array() if several else None)
                met_array = meet_arrays(array, limit, self.simplify)
                alternatives += [met_array._replace(evaluated=None)] if met_array else []
            else:
                alternatives.append(array)
        return form._replace(arrays=tuple(alternatives))


def _object_of_names(names: Term) -> Object:
    others = (KeyClass(names, TRUE, True), KeyClass(complement(names), NEVER))
    return Object(others=tuple(keys for keys in others if keys.names is not NOTHING))


def _object_requiring(names: list[str]) -> Object:
    return Object(required=frozenset(names), declared=tuple((name, TRUE) for name in dict.fromkeys(names)))


def _listed_texts(node: Node) -> frozenset[str]:
    """The values of a schema, if it lists them and all are texts."""
    values = node.keywords.get("enum", [node.keywords.get("const")])
    return frozenset(values) if all(isinstance(value, str) for value in values) else frozenset()


def text_keyword(node: Node) -> str:
    """The keyword for texts or names that is likely to take most states."""
    return next((word for word in _TEXT_KEYWORDS if word in node.keywords), "pattern")
