// Classes of states that read the same tokens with few quotes.

#pragma once

#include "automaton.h"

namespace stepgraph {

// Classes of states that read the same tokens with up to as many quotes as the number of the level, and pop and push the same symbols.
struct Level {
    Ints class_of; // [states]
    Ints first; // [classes] the first state
    // [bytes][classes] larger classes, from which the same texts of at most as many bytes are read, with the same symbols popped and pushed
    std::vector<Ints> coarser;
    int32_t coarser_classes = 0; // number of classes in `coarser`
    bool is_final = false; // whether the last of `coarser` holds for texts of any length
};

class Levels {
public:
    explicit Levels(const Automaton &automaton);

    size_t size() const { return levels.size(); }
    const Level &operator[](size_t level) const { return levels[level]; }

    void find_coarser(); // of the first level

private:
    void leave_out_quotes();
    Ints kinds_after_quotes(const Ints &classes) const;

    const Automaton &automaton;
    const Rows rows; // compares the states of `unquoted`
    const int32_t quote; // the byte class of the quote, or -1 if the class has other bytes
    Automaton unquoted; // the spans without the quote and without counters; a move that pushes has the symbol in place of a counter
    std::vector<Level> levels;
};

} // namespace stepgraph
