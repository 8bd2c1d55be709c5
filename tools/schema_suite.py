"""Rewrites the table of results of each grammar back end on the JSON-Schema-Test-Suite, and prints the totals.

    python tools/schema_suite.py            # after a change; review the difference, then commit it
    python tools/schema_suite.py --import-from path/to/tests

The suite is in tests/data with its licence, one schema per line; --import-from updates it from a checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tests.*

from tests.helpers import schema_cases

SCHEMA_URIS = {  # draft of the schemas of a folder, most of which do not state it
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
}


def older_drafts(folder: Path) -> str:
    lines = []
    for draft, uri in SCHEMA_URIS.items():
        for line in imported(folder / draft).splitlines():
            entry = json.loads(line)
            schema = entry["schema"] if isinstance(entry["schema"], dict) else {} if entry["schema"] else {"not": {}}
            if entry["file"] != "refRemote":
                lines.append(json.dumps({"draft": draft, **entry, "schema": {"$schema": uri} | schema}, separators=(",", ":")) + "\n")
    return "".join(lines)


def imported(folder: Path) -> str:
    """The required tests of one draft, one line per schema, without unused fields."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            tests = [{"data": test["data"], "valid": test["valid"]} for test in group["tests"]]
            entry = {"file": path.stem, "description": group["description"], "schema": group["schema"], "tests": tests}
            lines.append(json.dumps(entry, separators=(",", ":")) + "\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--import-from", type=Path, help="update the suite from this folder, which has one for each draft")
    options = parser.parse_args()
    if options.import_from:
        schema_cases.SUITE.write_text(imported(options.import_from / "draft2020-12"), encoding="utf-8")
        schema_cases.OLDER_DRAFTS.write_text(older_drafts(options.import_from), encoding="utf-8")
    found = schema_cases.outcomes()
    changed = schema_cases.differences(schema_cases.stored_outcomes() if schema_cases.TABLE.exists() else {}, found)
    text = schema_cases.to_json(found)
    schema_cases.TABLE.write_text(text, encoding="utf-8")
    print("\n".join(changed), file=sys.stderr)
    print(json.dumps(json.loads(text)["totals"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
