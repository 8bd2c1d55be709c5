// Which texts are legal in every state without a walk over their bytes: those of some groups of bytes, and those of plain characters.

#pragma once

#include "automaton.h"
#include "vocabulary.h"

namespace stepgraph {

struct WalkState { // the data of a state that a walk reads
    uint64_t groups = 0; // every text of these byte groups of at most `closed` bytes is legal and remains in the part of the grammar
    int32_t closed = 0;
    int32_t pop = -1;
    int32_t surely = 0; // every plain text of at most this number of bytes is legal
};

std::vector<WalkState> walk_states_of(const Automaton &automaton); // without `surely`

// For each state the number n such that its plain tokens, of at most `longest` characters, are exactly those of at most n; 0 if there is no
// such number. Also finds `surely` of the walk states.
Ints plain_rows(const Automaton &automaton, int32_t longest, std::vector<WalkState> &walk_states);

} // namespace stepgraph
