// Sequences of integers, each stored once.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace stepgraph {

using Ints = std::vector<int32_t>;

// Items that are stored elsewhere.
template <class Item> struct Slice {
    const Item *first, *last;
    const Item *begin() const { return first; }
    const Item *end() const { return last; }
    bool empty() const { return first == last; }
    size_t size() const { return (size_t)(last - first); }
};

inline uint64_t mixed(uint64_t value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}

// Numbers sequences from 0 on; equal sequences have the same number. A hash table with open addressing.
class Interned {
public:
    struct Found {
        int32_t number;
        bool is_new;
    };

    Found add(const int32_t *values, size_t length) {
        uint64_t sum = length; // std::hash, which is called in another library, takes a tenth of the compile time
        for (size_t at = 0; at < length; at++) sum = (sum ^ (uint32_t)values[at]) * 0x9e3779b97f4a7c15ull, sum ^= sum >> 32;
        auto hash = (uint32_t)sum;
        size_t at = (size_t)hash & (slots.size() - 1);
        for (; slots[at].number >= 0; at = (at + 1) & (slots.size() - 1))
            if (slots[at].hash == hash && is_equal(slots[at].number, values, length)) return {slots[at].number, false};
        slots[at] = {hash, size()};
        pool.insert(pool.end(), values, values + length);
        begin.push_back(pool.size());
        if (begin.size() * 2 > slots.size()) grow();
        return {size() - 1, true};
    }
    Found add(const Ints &values) { return add(values.data(), values.size()); }

    int32_t size() const { return (int32_t)begin.size() - 1; }
    size_t total() const { return pool.size(); }
    // A sequence; valid until the next one is added.
    Slice<int32_t> of(int32_t number) const { return {pool.data() + begin[(size_t)number], pool.data() + begin[(size_t)number + 1]}; }

private:
    struct Slot {
        uint32_t hash = 0;
        int32_t number = -1;
    };

    bool is_equal(int32_t number, const int32_t *other, size_t size) const {
        return of(number).size() == size && std::equal(other, other + size, of(number).begin());
    }

    void grow() {
        std::vector<Slot> before(slots.size() * 4);
        before.swap(slots);
        for (const Slot &slot : before) {
            if (slot.number < 0) continue;
            size_t at = (size_t)slot.hash & (slots.size() - 1);
            while (slots[at].number >= 0) at = (at + 1) & (slots.size() - 1);
            slots[at] = slot;
        }
    }

    Ints pool;
    std::vector<size_t> begin = {0};
    std::vector<Slot> slots = std::vector<Slot>(256);
};

} // namespace stepgraph
