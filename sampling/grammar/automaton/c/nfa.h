// A grammar as a nondeterministic automaton over bytes, with calls of other automata and with loops that count.

#pragma once

#include "interned.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

extern "C" {
#include "compile.h"
}

namespace stepgraph {

constexpr int MAX_COUNTERS = 3; // nested loops with a counter; also the number of counters of a matcher's state

// Why a grammar has no automaton within the limits. Such a grammar uses the host link.
struct Unfit : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct LimitReached : Unfit {
    using Unfit::Unfit;
};

[[noreturn]] inline void exceeded(const char *field, int64_t limit) {
    std::string expected = ": got a grammar that takes more, expected at most " + std::to_string(limit);
    throw LimitReached("GrammarLimits.automaton_" + std::string(field) + expected);
}

struct Limits {
    int64_t states, bytes, steps, depth; // as in GrammarLimits
    int64_t longest_token; // in bytes: no token goes through more iterations of a loop
};

using Grammar = parsed_grammar;

template <class Item> void sort_unique(std::vector<Item> &values) { // most are sorted already
    if (std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end()) return;
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
}

// Items of states, in the order of the states.
template <class Item> class ByState {
public:
    void add(int32_t state, const Item &item) { added.push_back({state, item}); }
    void sort(size_t states) { // call once, after the last `add`
        starts.assign(states + 1, 0);
        for (auto &[state, item] : added) starts[(size_t)state + 1]++;
        for (size_t state = 0; state < states; state++) starts[state + 1] += starts[state];
        Ints fill(starts.begin(), starts.end() - 1);
        items.resize(added.size());
        for (auto &[state, item] : added) items[(size_t)fill[(size_t)state]++] = item;
        added = {};
    }
    Slice<Item> of(int32_t state) const { return {items.data() + starts[(size_t)state], items.data() + starts[(size_t)state + 1]}; }

private:
    std::vector<std::pair<int32_t, Item>> added;
    std::vector<Item> items;
    Ints starts;
};

struct Nfa {
    struct Edge { int32_t low, high, to; }; // a range of bytes
    struct Call { int32_t automaton, back, byte = -1, to = -1; }; // run an automaton, then `back`; byte >= 0: its first byte, then `to`
    // A loop runs at most `count` times through its body, from `head` to a state of kind AGAIN, and then continues in `exit`.
    struct Loop { int32_t head, exit, count, counter, parent; int64_t expression; };
    enum Kind : uint8_t { PLAIN, ENTER, AGAIN };
    struct State {
        int32_t final_of = -1; // the automaton that ends here
        int32_t loop = -1; // the innermost loop that the state is inside of
        Kind kind = PLAIN;
        int32_t target_loop = -1; // of ENTER and AGAIN
    };
    std::vector<State> states;
    ByState<Edge> edges;
    ByState<int32_t> next; // transitions without a byte
    ByState<Call> calls;
    Ints starts; // start state of automaton 0, the grammar, and of the called automata
    std::vector<Loop> loops;
};

// A rule that is used in many places has as many copies in the automaton. A called automaton may take fewer states.
struct ManyCopies : Unfit {
    using Unfit::Unfit;
};

// Alternatives that become called automata. FEW: only recursive ones. ANY_SIZE: as FEW, without ManyCopies. BRACKETS: also all that begin
// with a brace or with the bracket of a recursive alternative. STRINGS: also strings.
enum class Calls { FEW, BRACKETS, STRINGS, ANY_SIZE };

// `unrolled`: expressions of loops to unroll. If a further loop must be unrolled, adds it and returns an empty automaton.
Nfa build_nfa(const Grammar &grammar, const Limits &limits, std::unordered_set<int64_t> &unrolled, Calls calls);

} // namespace stepgraph
