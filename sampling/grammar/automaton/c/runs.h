// Rows of tables as runs of equal entries: the byte classes of a state mostly lead to few others.

#pragma once

#include "automaton.h"
#include "interned.h"

namespace stepgraph {

struct Runs {
    struct Run {
        int32_t entry, end; // neighbouring columns with one entry: `end` is behind the last
        uint64_t factor;
    };
    std::vector<Run> runs;
    std::vector<int32_t> start = {0}; // [rows + 1]
    std::vector<int32_t> left_out_entries; // [rows]

    // The column `left_out` is in no run; -1: there is none.
    Runs(int32_t columns, int32_t left_out) : columns(columns), left_out(left_out), factors(1, 0) {
        for (int32_t column = 0; column < columns; column++) factors.push_back(factors.back() + (column == left_out ? 0 : mixed((uint64_t)column + 1)));
    }

    void add_row(Automaton::Spans spans) {
        int32_t at = 0;
        left_out_entries.push_back(DEAD);
        for (const Span &span : spans) {
            if (span.low <= left_out && left_out < span.end) left_out_entries.back() = span.entry;
            add(at, span.low, DEAD);
            add(span.low, span.end, span.entry);
            at = span.end;
        }
        add(at, columns, DEAD);
        start.push_back((int32_t)runs.size());
    }

    // Rows are equal if after(entry) is, in every column. Equal rows have equal hashes.
    template <class After> uint64_t hash(int32_t row, const After &after) const {
        uint64_t sum = 0;
        for (int32_t at = start[(size_t)row]; at < start[(size_t)row + 1]; at++) sum += (uint64_t)after(runs[(size_t)at].entry) * runs[(size_t)at].factor;
        return sum;
    }

    template <class After> bool is_equal(int32_t row, int32_t other, const After &after) const {
        for (int32_t at = start[(size_t)row], with = start[(size_t)other]; at < start[(size_t)row + 1];) {
            const Run &left = runs[(size_t)at], &right = runs[(size_t)with];
            if (after(left.entry) != after(right.entry)) return false;
            at += left.end <= right.end;
            with += right.end <= left.end;
        }
        return true;
    }

private:
    void add(int32_t low, int32_t end, int32_t entry) {
        low += low == left_out;
        end -= end - 1 == left_out;
        if (low >= end) return;
        if ((int32_t)runs.size() == start.back() || entry != runs.back().entry) runs.push_back({entry, end, 0});
        runs.back().end = end;
        runs.back().factor += factors[(size_t)end] - factors[(size_t)low];
    }

    int32_t columns, left_out;
    std::vector<uint64_t> factors; // [columns + 1] sums of those of the columns before
};

} // namespace stepgraph
