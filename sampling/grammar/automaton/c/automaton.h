// A deterministic automaton over bytes, with a stack of symbols where the grammar recurses, and counters where it counts.

#pragma once

#include "nfa.h"

#include <array>
#include <functional>

namespace stepgraph {

// No deterministic automaton with these calls accepts the grammar; one with other calls may.
struct Nondeterministic : Unfit {
    using Unfit::Unfit;
};

// This loop cannot be counted, because a text can be in two of its iterations at once. It must be unrolled.
struct Uncountable {
    int64_t expression;
};

constexpr int32_t DEAD = -1, SPECIAL = 1 << 30; // an entry of `next` is DEAD, a state, or SPECIAL + an index of `moves`
constexpr int MAX_SETS = 2; // counters that one move sets

using Sets = std::array<int32_t, 2 * MAX_SETS>; // (counter, value) pairs; counter -1: none

// A move that does more than enter a state. With `counter` >= 0 that counter is decremented first; if it was 1, the move goes to
// `last_target` and sets `last_sets` instead.
struct Move {
    int32_t target = DEAD, push = -1, counter = -1, last_target = DEAD;
    Sets sets, last_sets;
    Move() { sets.fill(-1), last_sets.fill(-1); }

    static constexpr size_t INTS = 4 + 4 * MAX_SETS; // size in int32
    const int32_t *ints() const { return (const int32_t *)this; }
};
static_assert(sizeof(Move) == Move::INTS * sizeof(int32_t));

// Adjacent byte classes with the same entry, from `low` to before `end`.
struct Span {
    int32_t low, end, entry;
};

struct Automaton {
    int32_t states = 0, classes = 0, symbols = 0, finish_sets = 0, start = 0;
    std::array<int32_t, MAX_COUNTERS> counters{}; // initial values
    std::array<uint8_t, 256> class_of{};
    std::vector<Span> spans; // by state, in the order of their classes; the entries of all other classes are DEAD
    Ints span_start{0}; // [states + 1]
    Ints next; // [states, classes] the spans as a table; only of a minimised automaton
    std::vector<Move> moves;
    Ints pop; // [states] -1, or the finish set: this state is left at once for go[finish set][symbol on top of the stack]
    std::vector<uint8_t> accepts; // [states]
    Ints go; // [finish sets, symbols] state or DEAD

    // Adds a span to the state after the last one that was ended.
    void add_span(const Span &span) {
        bool is_first = (int32_t)spans.size() == span_start.back();
        if (!is_first && spans.back().end == span.low && spans.back().entry == span.entry) spans.back().end = span.end;
        else spans.push_back(span);
    }
    void end_state() { span_start.push_back((int32_t)spans.size()); }

    Slice<Span> spans_of(int32_t state) const {
        return {spans.data() + span_start[(size_t)state], spans.data() + span_start[(size_t)state + 1]};
    }

    int32_t entry_of(int32_t state, int32_t c) const { return next[(size_t)state * (size_t)classes + (size_t)c]; }
    int32_t push_of(int32_t entry) const { return entry >= SPECIAL ? moves[(size_t)(entry - SPECIAL)].push : -1; }
    // The state after an entry, or DEAD; for a counted loop, the state while iterations are left.
    int32_t target_of(int32_t entry) const { return entry >= SPECIAL ? moves[(size_t)(entry - SPECIAL)].target : entry; }

    std::vector<std::vector<uint8_t>> bytes_by_class() const {
        std::vector<std::vector<uint8_t>> bytes((size_t)classes);
        for (size_t byte = 0; byte < 256; byte++) bytes[class_of[byte]].push_back((uint8_t)byte);
        return bytes;
    }

    // Sum over the classes that a state reads, given the prefix sums over classes.
    int32_t sum_of(int32_t state, const Ints &before) const {
        int32_t sum = 0;
        for (const Span &span : spans_of(state)) sum += before[(size_t)span.end] - before[(size_t)span.low];
        return sum;
    }
};

// Compares states by their spans: rows of a table with a column for each byte class.
class Rows {
public:
    explicit Rows(int32_t classes) : factors(1, 0) {
        for (int32_t at = 0; at < classes; at++) factors.push_back(factors.back() + mixed((uint64_t)at + 1));
    }

    uint64_t factor(const Span &span) const { return factors[(size_t)span.end] - factors[(size_t)span.low]; }

    // Rows have equal hashes if after(entry), which is at least -2, is equal in every column.
    template <class After> uint64_t hash(Slice<Span> row, const After &after) const {
        uint64_t sum = 0;
        for (const Span &span : row) sum += ((uint64_t)after(span.entry) + 3) * factor(span);
        return sum;
    }

    template <class Same> bool is_equal(Slice<Span> row, Slice<Span> other, const Same &same) const {
        for (int32_t at = 0;; at = std::min(row.first->end, other.first->end)) {
            int32_t column = next_column(row, at);
            if (column != next_column(other, at)) return false;
            if (row.empty()) return true;
            if (!same(row.first->entry, other.first->entry)) return false;
        }
    }

private:
    // The first column from `at` on with an entry, or -1. Drops the spans of `row` before this entry.
    static int32_t next_column(Slice<Span> &row, int32_t at) {
        for (; !row.empty(); ++row.first)
            if (at < row.first->end) return std::max(at, row.first->low);
        return -1;
    }

    std::vector<uint64_t> factors; // [classes + 1] sums of the factors of all classes before
};

Automaton determinise(const Nfa &nfa, const Limits &limits);
Automaton minimise(Automaton automaton);
// [states] numbers from 0 on, equal for states that read the same texts; then for those of them that also have equal kinds, given the first
std::array<Ints, 2> equivalent_states(const Automaton &automaton, const std::function<Ints(const Ints &)> &kinds);

} // namespace stepgraph
