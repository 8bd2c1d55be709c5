// A mask row in which few words are not zero.

#pragma once

#include "nfa.h"

namespace stepgraph {

struct SparseRow {
    std::vector<uint32_t> bits; // [words]
    std::vector<uint64_t> used; // one bit per word that may be nonzero

    explicit SparseRow(size_t words) : bits(words, 0), used(words / 64 + 1, 0), pairs(2 * words) {}

    void set(uint32_t word, uint32_t more) {
        bits[word] |= more;
        used[word / 64] |= 1ull << word % 64;
    }

    void add(uint32_t number) { set(number / 32, 1u << number % 32); }

    void set(Slice<int32_t> pairs) { // of word index and bits
        for (const int32_t *at = pairs.first; at < pairs.last; at += 2) set((uint32_t)at[0], (uint32_t)at[1]);
    }

    // Removes the nonzero words; all numbers are from `first` to before `past_last`. Pairs of word index and bits, in order; valid until
    // the next call.
    Slice<int32_t> take(size_t first, size_t past_last) {
        int32_t *past = pairs.data();
        uint64_t *begin = used.data(), *end = begin + (past_last + 2047) / 2048;
        for (uint64_t *at = begin + first / 2048; at < end; at++)
            for (uint64_t left = std::exchange(*at, 0); left; left &= left - 1) {
                size_t word = (size_t)(at - begin) * 64 + (size_t)__builtin_ctzll(left);
                *past++ = (int32_t)word, *past++ = (int32_t)std::exchange(bits[word], 0);
            }
        return {pairs.data(), past};
    }

private:
    Ints pairs;
};

} // namespace stepgraph
