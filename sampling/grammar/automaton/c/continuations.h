// What may follow after a token has left the part of the grammar in which it began: sets of states, numbered as they are found. The stack
// is not known, so a part that ends continues as after any symbol. A counted loop may be in its last iteration.

#pragma once

#include "automaton.h"

namespace stepgraph {

class Continuations {
public:
    static constexpr int32_t NONE = -1, ANY = -2; // no text may follow; the limit of work is reached, and any text may follow

    explicit Continuations(const Automaton &automaton)
        : automaton(automaton), after((size_t)automaton.finish_sets, UNKNOWN), added((size_t)automaton.states, 0) {}

    // The set after the end of a part.
    int32_t after_part(int32_t finish_set) {
        int32_t &found = after[(size_t)finish_set];
        if (found == UNKNOWN) {
            ended.push_back(finish_set);
            found = number_added();
        }
        return found;
    }

    // The set after a byte class.
    int32_t next(int32_t set, int32_t c) {
        if (set < 0) return set;
        size_t at = (size_t)set * (size_t)automaton.classes + (size_t)c;
        if (moves[at] == UNKNOWN) {
            for (int32_t state : sets.of(set)) {
                int32_t entry = automaton.next[(size_t)state * (size_t)automaton.classes + (size_t)c];
                if (entry < SPECIAL) add(entry);
                else add(automaton.moves[entry - SPECIAL].target), add(automaton.moves[entry - SPECIAL].last_target);
            }
            int32_t found = number_added(); // may move `moves`
            moves[at] = found;
        }
        return moves[at];
    }

private:
    static constexpr int32_t UNKNOWN = -3;
    static constexpr int64_t MAX_WORK = 4'000'000; // states read, and elements of `moves`: some milliseconds and 16 MB

    void add(int32_t state) {
        work++;
        if (state < 0 || added[(size_t)state] == round) return;
        added[(size_t)state] = round;
        if (int32_t pop = automaton.pop[state]; pop >= 0) ended.push_back(pop);
        else set.push_back(state);
    }

    // The number of the set of states that were added.
    int32_t number_added() {
        while (!ended.empty()) {
            const int32_t *to = &automaton.go[(size_t)ended.back() * (size_t)automaton.symbols];
            ended.pop_back();
            for (int32_t symbol = 0; symbol < automaton.symbols && work < MAX_WORK; symbol++) add(to[symbol]);
        }
        std::sort(set.begin(), set.end());
        int32_t number = work < MAX_WORK ? set.empty() ? NONE : sets.add(set).number : ANY;
        if (moves.size() < (size_t)sets.size() * (size_t)automaton.classes) {
            moves.resize((size_t)sets.size() * (size_t)automaton.classes, UNKNOWN);
            work += automaton.classes;
        }
        set.clear();
        round++;
        return number;
    }

    const Automaton &automaton;
    Interned sets;
    Ints after; // [finish sets] set
    Ints moves; // [sets, classes] set
    Ints set, ended, added; // being built: its states; finish sets of parts that end; [states] the last `round` in which a state was added
    int32_t round = 1;
    int64_t work = 0;
};

} // namespace stepgraph
