"""How a JSON schema is read, and which texts of its values are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEFT_OUT = frozenset(  # keywords that are left out of an approximate grammar where they are not enforced
    "contains divisibleBy format if maxContains maxProperties minContains minProperties multipleOf not pattern patternProperties"
    " propertyNames unevaluatedItems unevaluatedProperties uniqueItems".split()
)
Objects = Literal["closed", "standard"]
Unknown = Literal["annotation", "refuse"]
PropertyOrder = Literal["declared", "any"]


@dataclass(frozen=True)
class Options:
    """As in `Constraint.json_schema`, which describes them."""

    any_whitespace: bool = False
    objects: Objects = "closed"
    unknown_keywords: Unknown = "annotation"
    unknown_formats: Unknown = "annotation"
    property_order: PropertyOrder = "declared"
    approximate: bool = False
