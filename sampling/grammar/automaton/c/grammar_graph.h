// The expressions of a parsed grammar, and how its rules refer to each other.

#pragma once

#include "nfa.h"

#include <map>
#include <set>

namespace stepgraph {

// Kinds of expressions in xgrammar's serialised grammar.
enum Expression { BYTES, CLASS, CLASS_STAR, EMPTY, RULE, SEQUENCE, CHOICES, TAGS, REPEAT, TOKEN, EXCLUDE_TOKEN, TOKEN_TAGS, REGEX };

constexpr int MAX_DEPTH = 3000; // nesting of expressions and rules: a level takes about 1,000 bytes of stack

struct View {
    int32_t kind, size;
    const int32_t *data;
};

class GrammarGraph {
public:
    explicit GrammarGraph(const Grammar &grammar);

    View view(int32_t expression) const {
        auto found = sequences.find(expression);
        if (found != sequences.end()) return {SEQUENCE, (int32_t)found->second.size(), found->second.data()};
        const int32_t *at = grammar.data + grammar.offsets[expression];
        return {at[0], at[1], at + 2};
    }

    // Calls `found(rule)` for each reference in an expression, except in `cut` expressions.
    template <class Found> void each_reference(int32_t expression, const std::set<int32_t> &cut, const Found &found) const {
        if (cut.count(expression)) return;
        View at = view(expression);
        if (at.kind == RULE || at.kind == REPEAT) found(at.data[0]);
        else if (at.kind == SEQUENCE || at.kind == CHOICES)
            for (int index = 0; index < at.size; index++) each_reference(at.data[index], cut, found);
        else if (at.kind == TAGS)
            for (int index = 1; index < at.size - 2; index += 2) found(at.data[index]);
    }

    // Strongly connected components of the rules that the root reaches and that refer to themselves outside of `cut`.
    std::vector<std::set<int32_t>> recursive_components(const std::set<int32_t> &cut) const;
    // 'r' if all references inside a component are at the end of their alternatives, 'l' if all are at the start; else 0.
    char linearity(const std::set<int32_t> &component, const std::set<int32_t> &cut) const;

    template <class Found> void each_alternative(int32_t expression, const Found &found) const {
        View at = view(expression);
        if (at.kind != CHOICES) return found(expression);
        for (int index = 0; index < at.size; index++) each_alternative(at.data[index], found);
    }

    // The first byte of an alternative that begins and ends with different literal bytes; else -1.
    int bracket_of(int32_t alternative) const;
    // Whether an alternative is a JSON string: a quote and a rule with the final quote, or a quote, parts without a quote, and a quote.
    bool is_string(int32_t alternative) const;
    // Moves the part of an alternative that begins and ends with literal bytes and refers to the component in between into a separate
    // sequence. The rest of the alternative may recurse at its start or at its end. Returns the sequence, or -1.
    int32_t split(int32_t alternative, const std::set<int32_t> &component);
    // The rules that the root reaches where no JSON string is open: a bracket inside a string, as in the format of a URI, opens no value.
    std::set<int32_t> rules_outside_strings() const;
    const Grammar &grammar;

private:
    std::map<int32_t, Ints> sequences; // added or changed by `split`
    std::set<int32_t> reached; // rules reached from the root
};

} // namespace stepgraph
