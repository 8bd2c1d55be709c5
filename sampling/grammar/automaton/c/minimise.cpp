// Minimisation of states and stack symbols together, after Valmari and Lehtinen, "Efficient minimization of DFAs with partial transition
// functions" (2008): partition refinement over states ("blocks") and over edges ("cords").

#include "automaton.h"
#include "interned.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace stepgraph {

namespace {

class Partition { // of 0..size-1 into sets; elements are marked, then each set is split into its marked and unmarked part
public:
    struct Element { int32_t at, set; }; // its place in `elements`
    struct Set { int32_t first, past, marked; }; // elements[first .. past], of which the first are marked
    Ints elements;
    std::vector<Element> element;
    std::vector<Set> sets;

    // One set for each key, 0 to keys-1, that an element has.
    Partition(const Ints &key_of, int32_t keys) : elements(key_of.size()), element(key_of.size()) {
        Ints start(keys + 1, 0);
        for (int32_t key : key_of) start[key + 1]++;
        std::partial_sum(start.begin(), start.end(), start.begin());
        Ints fill(start.begin(), start.end() - 1), number(keys, -1);
        for (int32_t key = 0; key < keys; key++)
            if (start[key] < start[key + 1]) number[key] = (int32_t)sets.size(), sets.push_back({start[key], start[key + 1], 0});
        for (int32_t index = 0; index < (int32_t)key_of.size(); index++) {
            int32_t key = key_of[index], at = fill[key]++;
            elements[at] = index;
            element[index] = {at, number[key]};
        }
    }

    void mark(int32_t index) {
        auto [from, number] = element[index];
        Set &set = sets[number];
        int32_t to = set.first + set.marked, other = elements[to];
        elements[from] = other;
        element[other].at = from;
        elements[to] = index;
        element[index].at = to;
        if (!set.marked++) touched.push_back(number);
    }

    void split() {
        for (; !touched.empty(); touched.pop_back()) {
            Set &set = sets[touched.back()];
            int32_t middle = set.first + std::exchange(set.marked, 0), number = (int32_t)sets.size();
            if (middle == set.past) continue;
            Set smaller; // gets the new number
            if (middle - set.first <= set.past - middle) {
                smaller = {set.first, middle, 0};
                set.first = middle;
            } else {
                smaller = {middle, set.past, 0};
                set.past = middle;
            }
            for (int32_t at = smaller.first; at < smaller.past; at++) element[elements[at]].set = number;
            sets.push_back(smaller);
        }
    }

private:
    Ints touched;
};

struct Edges { // from, label, to
    Ints from, label, to;
    int32_t labels; // all are below this
    void add(int32_t source, int32_t name, int32_t target) { from.push_back(source), label.push_back(name), to.push_back(target); }
};

// One byte class for all bytes with equal columns.
void merge_classes(Automaton &automaton) {
    size_t states = (size_t)automaton.states, classes = (size_t)automaton.classes;
    std::vector<uint64_t> hashes(classes, 0);
    for (size_t state = 0; state < states; state++)
        for (size_t at = 0; at < classes; at++)
            hashes[at] = (hashes[at] ^ (uint32_t)automaton.next[state * classes + at]) * 0x9e3779b97f4a7c15ull ^ hashes[at] >> 29;
    auto equal = [&](size_t left, size_t right) {
        for (size_t state = 0; state < states; state++)
            if (automaton.next[state * classes + left] != automaton.next[state * classes + right]) return false;
        return true;
    };
    std::multimap<uint64_t, int32_t> seen;
    Ints kept, renamed(classes);
    for (size_t at = 0; at < classes; at++) {
        auto [same, end] = seen.equal_range(hashes[at]);
        while (same != end && !equal((size_t)kept[same->second], at)) ++same;
        if (same != end) {
            renamed[at] = same->second;
            continue;
        }
        renamed[at] = (int32_t)kept.size();
        seen.emplace(hashes[at], renamed[at]);
        kept.push_back((int32_t)at);
    }
    if (kept.size() == classes) return;
    Ints next(states * kept.size());
    for (size_t state = 0; state < states; state++)
        for (size_t at = 0; at < kept.size(); at++) next[state * kept.size() + at] = automaton.next[state * classes + (size_t)kept[at]];
    automaton.next.swap(next);
    automaton.classes = (int32_t)kept.size();
    for (uint8_t &value : automaton.class_of) value = (uint8_t)renamed[value];
}

Edges edges_of(const Automaton &automaton) {
    Edges edges;
    std::map<Ints, int32_t> labels; // beyond those of plain moves, which are the byte classes
    auto label = [&](Ints key) { return labels.emplace(std::move(key), automaton.classes + (int32_t)labels.size()).first->second; };
    for (int32_t state = 0; state < automaton.states; state++)
        for (int32_t at = 0; at < automaton.classes; at++) {
            int32_t entry = automaton.next[(size_t)state * automaton.classes + at];
            if (entry == DEAD) continue;
            if (entry < SPECIAL) {
                edges.add(state, at, entry);
                continue;
            }
            const Move &move = automaton.moves[entry - SPECIAL];
            Ints key{0, at, move.counter, move.push >= 0, move.last_target >= 0};
            key.insert(key.end(), move.sets.begin(), move.sets.end());
            key.insert(key.end(), move.last_sets.begin(), move.last_sets.end());
            edges.add(state, label(key), move.target);
            if (move.push >= 0) edges.add(state, label({1, at}), automaton.states + move.push);
            if (move.last_target >= 0) edges.add(state, label({2, at}), move.last_target);
        }
    for (int32_t finish = 0; finish < automaton.finish_sets; finish++)
        for (int32_t symbol = 0; symbol < automaton.symbols; symbol++) {
            int32_t to = automaton.go[(size_t)finish * automaton.symbols + symbol];
            if (to >= 0) edges.add(automaton.states + symbol, label({3, finish}), to);
        }
    edges.labels = automaton.classes + (int32_t)labels.size();
    return edges;
}

// Blocks of equivalent states and symbols (numbered from `states` on).
Partition equivalent(const Automaton &automaton, const Edges &edges) {
    int32_t nodes = automaton.states + automaton.symbols, count = (int32_t)edges.from.size();
    Ints start((size_t)nodes + 1, 0), from((size_t)count), label((size_t)count); // edges by where they lead, so that those into a node are neighbours
    for (int32_t to : edges.to) start[(size_t)to + 1]++;
    std::partial_sum(start.begin(), start.end(), start.begin());
    Ints fill(start.begin(), start.end() - 1);
    std::vector<uint64_t> labels((size_t)nodes, 0); // equivalent nodes have edges with the same labels
    for (size_t edge = 0; edge < (size_t)count; edge++) {
        auto at = (size_t)fill[(size_t)edges.to[edge]]++;
        from[at] = edges.from[edge];
        label[at] = edges.label[edge];
        labels[(size_t)from[at]] += mixed((uint64_t)label[at] + 1);
    }
    std::map<std::tuple<int32_t, int32_t, uint64_t>, int32_t> kinds;
    Ints kind_of;
    for (int32_t node = 0; node < nodes; node++) {
        bool is_state = node < automaton.states;
        std::tuple kind(is_state ? automaton.accepts[(size_t)node] : -1, is_state ? automaton.pop[(size_t)node] : -1, labels[(size_t)node]);
        kind_of.push_back(kinds.emplace(kind, (int32_t)kinds.size()).first->second);
    }
    Partition blocks(kind_of, (int32_t)kinds.size()), cords(label, edges.labels);
    size_t block = 1; // all edges with a label that do not lead to other blocks lead to the first
    for (size_t cord = 0; cord < cords.sets.size(); cord++) {
        for (int32_t at = cords.sets[cord].first; at < cords.sets[cord].past; at++) blocks.mark(from[(size_t)cords.elements[(size_t)at]]);
        blocks.split();
        for (; block < blocks.sets.size(); block++) {
            for (int32_t at = blocks.sets[block].first; at < blocks.sets[block].past; at++) {
                auto node = (size_t)blocks.elements[(size_t)at];
                for (int32_t edge = start[node]; edge < start[node + 1]; edge++) cords.mark(edge);
            }
            cords.split();
        }
    }
    return blocks;
}

} // namespace

Automaton minimise(Automaton automaton) {
    merge_classes(automaton);
    Partition blocks = equivalent(automaton, edges_of(automaton));
    int32_t classes = automaton.classes;
    Ints number(blocks.sets.size(), -1), kept;
    auto keep = [&](int32_t state) {
        if (state < 0) return;
        int32_t &known = number[blocks.element[state].set];
        if (known < 0) known = (int32_t)kept.size(), kept.push_back(state);
    };
    keep(automaton.start); // breadth first: states that follow each other are close in memory
    for (size_t at = 0; at < kept.size(); at++) {
        for (int32_t c = 0; c < classes; c++) {
            int32_t entry = automaton.next[(size_t)kept[at] * classes + c];
            if (entry >= SPECIAL) {
                keep(automaton.moves[entry - SPECIAL].target);
                keep(automaton.moves[entry - SPECIAL].last_target);
            } else {
                keep(entry);
            }
        }
        if (at + 1 == kept.size())
            for (int32_t state : automaton.go) keep(state);
    }
    Ints symbol_number(blocks.sets.size(), -1), symbols;
    for (int32_t symbol = 0; symbol < automaton.symbols; symbol++) {
        int32_t &known = symbol_number[blocks.element[automaton.states + symbol].set];
        if (known < 0) known = (int32_t)symbols.size(), symbols.push_back(symbol);
    }
    auto renamed = [&](int32_t state) { return state < 0 ? DEAD : number[blocks.element[state].set]; };
    Automaton smaller;
    smaller.states = (int32_t)kept.size();
    smaller.classes = classes;
    smaller.symbols = (int32_t)symbols.size();
    smaller.finish_sets = automaton.finish_sets;
    smaller.counters = automaton.counters;
    smaller.class_of = automaton.class_of;
    std::map<Ints, int32_t> moves;
    for (int32_t state : kept) {
        smaller.pop.push_back(automaton.pop[state]);
        smaller.accepts.push_back(automaton.accepts[state]);
        for (int32_t c = 0; c < classes; c++) {
            int32_t entry = automaton.next[(size_t)state * classes + c];
            if (entry >= SPECIAL) {
                Move move = automaton.moves[entry - SPECIAL];
                move.target = renamed(move.target);
                move.last_target = renamed(move.last_target);
                if (move.push >= 0) move.push = symbol_number[blocks.element[automaton.states + move.push].set];
                Ints key{move.target, move.push, move.counter, move.last_target};
                key.insert(key.end(), move.sets.begin(), move.sets.end());
                key.insert(key.end(), move.last_sets.begin(), move.last_sets.end());
                auto [at, is_new] = moves.emplace(std::move(key), (int32_t)smaller.moves.size());
                if (is_new) smaller.moves.push_back(move);
                smaller.next.push_back(SPECIAL + at->second);
            } else {
                smaller.next.push_back(renamed(entry));
            }
        }
    }
    for (int32_t finish = 0; finish < smaller.finish_sets; finish++)
        for (int32_t symbol : symbols) smaller.go.push_back(renamed(automaton.go[(size_t)finish * automaton.symbols + symbol]));
    merge_classes(smaller);
    return smaller;
}

} // namespace stepgraph
