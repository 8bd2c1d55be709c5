// Rows of tables as runs of equal entries: the byte classes of a state mostly lead to few others.

#pragma once

#include "interned.h"

namespace stepgraph {

struct Runs {
    struct Run {
        int32_t entry, end; // neighbouring columns with one entry: `end` is behind the last
        uint64_t factor;
    };
    std::vector<Run> runs;
    std::vector<int32_t> start = {0}; // [rows + 1]

    void add_row(const int32_t *entries, int32_t columns, int32_t left_out = -1) {
        while ((int32_t)factors.size() < columns) factors.push_back(mixed(factors.size() + 1));
        for (int32_t column = 0; column < columns; column++) {
            if (column == left_out) continue;
            if ((int32_t)runs.size() == start.back() || entries[column] != runs.back().entry) runs.push_back({entries[column], column, 0});
            runs.back().end = column + 1;
            runs.back().factor += factors[(size_t)column]; // the terms of the hash do not wait for each other
        }
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
    std::vector<uint64_t> factors; // [columns]
};

} // namespace stepgraph
