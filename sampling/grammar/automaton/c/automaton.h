// A deterministic automaton over bytes, with a stack of symbols where the grammar recurses, and counters where it counts.

#pragma once

#include "nfa.h"

#include <array>

namespace stepgraph {

// The grammar has automata, but no deterministic one with these calls.
struct Nondeterministic : Unfit {
    using Unfit::Unfit;
};

// This loop cannot be counted: a text is at two of its iterations at once. It has to be written out.
struct Uncountable {
    int64_t expression;
};

constexpr int32_t DEAD = -1, SPECIAL = 1 << 30; // an entry of `next` is DEAD, a state, or SPECIAL + an index of `moves`
constexpr int MAX_SETS = 2; // counters that one move sets

// A move that does more than enter a state. With `counter` >= 0 that counter is decremented first; if it was 1, the move goes to
// `last_target` and sets `last_sets` instead.
struct Move {
    int32_t target = DEAD, push = -1, counter = -1, last_target = DEAD;
    std::array<int32_t, 2 * MAX_SETS> sets, last_sets; // (counter, value) pairs; counter -1: none
    Move() { sets.fill(-1), last_sets.fill(-1); }
};

// Neighbouring byte classes with one entry, from `low` to before `end`.
struct Span {
    int32_t low, end, entry;
};

struct Automaton {
    int32_t states = 0, classes = 0, symbols = 0, finish_sets = 0, start = 0;
    std::array<int32_t, MAX_COUNTERS> counters{}; // at the start
    std::array<uint8_t, 256> class_of{};
    std::vector<Span> spans; // by state, in the order of their classes; entries that are not in them are DEAD
    Ints span_start{0}; // [states + 1]
    Ints next; // [states, classes] the same as a table; only of a minimised automaton
    std::vector<Move> moves;
    Ints pop; // [states] -1, or the finish set: this state is left at once for go[finish set][symbol on top of the stack]
    std::vector<uint8_t> accepts; // [states]
    Ints go; // [finish sets, symbols] state or DEAD

    // Adds classes of the state after the last one that was ended.
    void add_span(const Span &span) {
        bool is_first = (int32_t)spans.size() == span_start.back();
        if (!is_first && spans.back().end == span.low && spans.back().entry == span.entry) spans.back().end = span.end;
        else spans.push_back(span);
    }
    void end_state() { span_start.push_back((int32_t)spans.size()); }

    struct Spans {
        const Span *first, *last;
        const Span *begin() const { return first; }
        const Span *end() const { return last; }
    };
    Spans spans_of(int32_t state) const { return {spans.data() + span_start[(size_t)state], spans.data() + span_start[(size_t)state + 1]}; }
};

Automaton determinise(const Nfa &nfa, const Limits &limits);
Automaton minimise(Automaton automaton);

} // namespace stepgraph
