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

struct Automaton {
    int32_t states = 0, classes = 0, symbols = 0, finish_sets = 0, start = 0;
    std::array<int32_t, MAX_COUNTERS> counters{}; // at the start
    std::array<uint8_t, 256> class_of{};
    Ints next; // [states, classes]
    std::vector<Move> moves;
    Ints pop; // [states] -1, or the finish set: this state is left at once for go[finish set][symbol on top of the stack]
    std::vector<uint8_t> accepts; // [states]
    Ints go; // [finish sets, symbols] state or DEAD
};

Automaton determinise(const Nfa &nfa, const Limits &limits);
Automaton minimise(Automaton automaton);

} // namespace stepgraph
