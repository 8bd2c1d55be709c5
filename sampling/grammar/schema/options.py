"""How a JSON schema is read, and which texts of its values are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OMITTABLE_KEYWORDS = frozenset(  # keywords that an approximate grammar leaves out if they cannot be enforced
    "contains divisibleBy format if maxContains maxProperties minContains minProperties multipleOf not pattern patternProperties"
    " propertyNames unevaluatedItems unevaluatedProperties uniqueItems".split()
)
ObjectsMode = Literal["closed", "standard"]
UnknownMode = Literal["annotation", "refuse"]
PropertyOrder = Literal["declared", "any"]


@dataclass(frozen=True)
class Options:
    """The options of `Constraint.json_schema`, described there."""

    any_whitespace: bool = False
    objects: ObjectsMode = "closed"
    unknown_keywords: UnknownMode = "annotation"
    unknown_formats: UnknownMode = "annotation"
    property_order: PropertyOrder = "declared"
    approximate: bool = False
