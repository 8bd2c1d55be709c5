// Classes of characters as ranges of the bytes that encode them in UTF-8.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace stepgraph {

using Range = std::pair<int32_t, int32_t>; // the first and the last of some characters or bytes

// The characters of a class expression: whether it is negated, then the first and last character of each range.
std::vector<Range> class_ranges(const int32_t *content, int size);

// Edges for one character: from state 0 to state 1 through states of its encoded bytes. Equal ends share their states.
struct Shape {
    struct Part { int32_t from, low, high, to; };
    std::vector<Part> parts;
    int32_t states = 2;
};

Shape shape_of(const std::vector<Range> &characters);

} // namespace stepgraph
