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

// One byte class for all bytes with equal columns: found by hashes of the columns, which are sums over spans, and compared.
void merge_classes(Automaton &automaton) {
    auto classes = (size_t)automaton.classes;
    std::vector<uint64_t> hashes(classes + 1, 0); // first the differences of neighbouring columns
    for (int32_t state = 0; state < automaton.states; state++)
        for (const Span &span : automaton.spans_of(state)) {
            uint64_t hash = mixed((uint64_t)state << 32 | (uint32_t)span.entry);
            hashes[(size_t)span.low] += hash;
            hashes[(size_t)span.end] -= hash;
        }
    std::partial_sum(hashes.begin(), hashes.end(), hashes.begin());
    Ints same(classes), others; // the first class with the hash, and the classes that are not the first
    std::unordered_map<uint64_t, int32_t> first;
    for (size_t at = 0; at < classes; at++) {
        same[at] = first.emplace(hashes[at], (int32_t)at).first->second;
        if (same[at] != (int32_t)at) others.push_back((int32_t)at);
    }
    if (others.empty()) return;
    Ints row(classes);
    for (int32_t state = 0; state < automaton.states; state++) {
        std::fill(row.begin(), row.end(), DEAD);
        for (const Span &span : automaton.spans_of(state)) std::fill(row.begin() + span.low, row.begin() + span.end, span.entry);
        for (int32_t at : others)
            if (row[(size_t)at] != row[(size_t)same[(size_t)at]]) same[(size_t)at] = at;
    }
    Ints kept_before(classes + 1, 0), renamed(classes); // kept_before: classes that remain
    for (size_t at = 0; at < classes; at++) {
        bool is_kept = same[at] == (int32_t)at;
        renamed[at] = is_kept ? kept_before[at] : renamed[(size_t)same[at]];
        kept_before[at + 1] = kept_before[at] + is_kept;
    }
    std::vector<Span> spans;
    Ints starts;
    spans.swap(automaton.spans);
    starts.swap(automaton.span_start);
    automaton.spans.reserve(spans.size());
    automaton.span_start.reserve(starts.size());
    automaton.span_start.push_back(0);
    for (int32_t state = 0; state < automaton.states; state++) {
        for (int32_t at = starts[(size_t)state]; at < starts[(size_t)state + 1]; at++) {
            int32_t low = kept_before[(size_t)spans[(size_t)at].low], end = kept_before[(size_t)spans[(size_t)at].end];
            if (low < end) automaton.add_span({low, end, spans[(size_t)at].entry});
        }
        automaton.end_state();
    }
    automaton.classes = kept_before.back();
    for (uint8_t &value : automaton.class_of) value = (uint8_t)renamed[value];
}

// Kinds of states and symbols (numbered from `states` on): equivalent ones have the same kind. A kind is a hash of the texts of some bytes
// that can be read. Those that are alone in their kind are equivalent to no other.
class Kinds {
public:
    explicit Kinds(const Automaton &automaton)
        : automaton(automaton), factors(1, 0), hashes((size_t)(automaton.states + automaton.symbols), 1), next(hashes.size()), open(hashes.size()) {
        for (int32_t at = 0; at < automaton.classes; at++) factors.push_back(factors.back() + mixed((uint64_t)at + 1));
        for (const Move &move : automaton.moves) {
            uint64_t hash = mixed((uint64_t)move.counter << 2 | (uint64_t)(move.push >= 0) << 1 | (move.last_target >= 0));
            for (const auto *sets : {&move.sets, &move.last_sets})
                for (int32_t value : *sets) hash = mixed(hash + (uint32_t)value);
            move_hashes.push_back(hash);
        }
        std::iota(open.begin(), open.end(), 0);
        for (size_t before = 2 * open.size(); open.size() * 10 < before * 9;) {
            before = open.size();
            for (int round = 0; round < ROUNDS; round++) {
                for (int32_t node : open) next[(size_t)node] = hash_of(node);
                for (int32_t node : open) hashes[(size_t)node] = next[(size_t)node];
            }
            leave_out_lone();
        }
    }

    // [nodes] the kind; `kinds` is set to their number.
    Ints numbered(int32_t &kinds) const {
        Ints kind_of(hashes.size(), -1);
        std::unordered_map<uint64_t, int32_t> numbers;
        for (int32_t node : open) kind_of[(size_t)node] = numbers.emplace(hashes[(size_t)node], (int32_t)numbers.size()).first->second;
        kinds = (int32_t)numbers.size();
        for (int32_t &kind : kind_of)
            if (kind < 0) kind = kinds++;
        return kind_of;
    }

    // Those that are not alone in their kind, in order.
    const Ints &several() const { return open; }

private:
    static constexpr int ROUNDS = 3;

    uint64_t hash_after(int32_t state) const { return state < 0 ? 3 : hashes[(size_t)state]; }

    uint64_t hash_after_entry(int32_t entry) const {
        if (entry < SPECIAL) return hash_after(entry);
        const Move &move = automaton.moves[(size_t)(entry - SPECIAL)];
        uint64_t pushed = move.push < 0 ? 0 : mixed(hashes[(size_t)(automaton.states + move.push)] + 1);
        return mixed(move_hashes[(size_t)(entry - SPECIAL)] + hash_after(move.target)) + pushed + mixed(hash_after(move.last_target) + 2);
    }

    uint64_t hash_of(int32_t node) const {
        if (int32_t symbol = node - automaton.states; symbol >= 0) {
            uint64_t sum = 1;
            for (int32_t finish = 0; finish < automaton.finish_sets; finish++)
                sum += mixed(hash_after(automaton.go[(size_t)finish * (size_t)automaton.symbols + (size_t)symbol]) + (uint64_t)finish);
            return mixed(sum);
        }
        uint64_t sum = (uint64_t)automaton.accepts[(size_t)node] << 32 | (uint32_t)automaton.pop[(size_t)node];
        for (const Span &span : automaton.spans_of(node)) sum += hash_after_entry(span.entry) * (factors[(size_t)span.end] - factors[(size_t)span.low]);
        return mixed(sum);
    }

    void leave_out_lone() {
        struct Slot { uint64_t hash = 0; int32_t count = 0; };
        size_t size = 16;
        while (size < open.size() * 2) size *= 2;
        std::vector<Slot> slots(size);
        auto slot_of = [&](int32_t node) -> Slot & {
            size_t at = (size_t)hashes[(size_t)node] & (size - 1);
            while (slots[at].count && slots[at].hash != hashes[(size_t)node]) at = (at + 1) & (size - 1);
            return slots[at];
        };
        for (int32_t node : open) {
            Slot &slot = slot_of(node);
            slot.hash = hashes[(size_t)node];
            slot.count++;
        }
        open.erase(std::remove_if(open.begin(), open.end(), [&](int32_t node) { return slot_of(node).count == 1; }), open.end());
    }

    const Automaton &automaton;
    std::vector<uint64_t> factors; // [classes + 1] sums of those of the classes before
    std::vector<uint64_t> move_hashes, hashes, next; // of moves; of nodes, and the next ones
    Ints open; // nodes that are not alone
};

// The edges of these states and symbols.
Edges edges_of(const Automaton &automaton, const Ints &nodes) {
    Edges edges;
    Interned labels; // beyond those of plain moves, which are the byte classes
    auto label = [&](const Ints &key) { return automaton.classes + labels.add(key).number; };
    for (int32_t state : nodes) {
        if (int32_t symbol = state - automaton.states; symbol >= 0) {
            for (int32_t finish = 0; finish < automaton.finish_sets; finish++) {
                int32_t to = automaton.go[(size_t)finish * (size_t)automaton.symbols + (size_t)symbol];
                if (to >= 0) edges.add(state, label({3, finish}), to);
            }
            continue;
        }
        for (const Span &span : automaton.spans_of(state))
            for (int32_t at = span.low; at < span.end; at++) {
                if (span.entry < SPECIAL) {
                    edges.add(state, at, span.entry);
                    continue;
                }
                const Move &move = automaton.moves[(size_t)(span.entry - SPECIAL)];
                Ints key{0, at, move.counter, move.push >= 0, move.last_target >= 0};
                key.insert(key.end(), move.sets.begin(), move.sets.end());
                key.insert(key.end(), move.last_sets.begin(), move.last_sets.end());
                edges.add(state, label(key), move.target);
                if (move.push >= 0) edges.add(state, label({1, at}), automaton.states + move.push);
                if (move.last_target >= 0) edges.add(state, label({2, at}), move.last_target);
            }
    }
    edges.labels = automaton.classes + labels.size();
    return edges;
}

// Blocks of equivalent states and symbols (numbered from `states` on).
Partition equivalent(const Automaton &automaton) {
    Kinds found(automaton);
    Edges edges = edges_of(automaton, found.several());
    int32_t nodes = automaton.states + automaton.symbols, count = (int32_t)edges.from.size(), kinds = 0;
    Ints start((size_t)nodes + 1, 0), from((size_t)count), label((size_t)count); // edges by where they lead, so that those into a node are neighbours
    for (int32_t to : edges.to) start[(size_t)to + 1]++;
    std::partial_sum(start.begin(), start.end(), start.begin());
    Ints fill(start.begin(), start.end() - 1);
    for (size_t edge = 0; edge < (size_t)count; edge++) {
        auto at = (size_t)fill[(size_t)edges.to[edge]]++;
        from[at] = edges.from[edge];
        label[at] = edges.label[edge];
    }
    Ints kind_of = found.numbered(kinds);
    Partition blocks(kind_of, kinds), cords(label, edges.labels);
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
    Partition blocks = equivalent(automaton);
    Ints number(blocks.sets.size(), -1), kept;
    auto keep = [&](int32_t state) {
        if (state < 0) return;
        int32_t &known = number[blocks.element[state].set];
        if (known < 0) known = (int32_t)kept.size(), kept.push_back(state);
    };
    keep(automaton.start); // breadth first: states that follow each other are close in memory
    for (size_t at = 0; at < kept.size(); at++) {
        for (const Span &span : automaton.spans_of(kept[at])) {
            if (span.entry >= SPECIAL) {
                keep(automaton.moves[(size_t)(span.entry - SPECIAL)].target);
                keep(automaton.moves[(size_t)(span.entry - SPECIAL)].last_target);
            } else {
                keep(span.entry);
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
    smaller.classes = automaton.classes;
    smaller.symbols = (int32_t)symbols.size();
    smaller.finish_sets = automaton.finish_sets;
    smaller.counters = automaton.counters;
    smaller.class_of = automaton.class_of;
    Interned moves;
    Ints renamed_moves(automaton.moves.size(), DEAD); // as entries
    auto renamed_move = [&](int32_t entry) {
        int32_t &known = renamed_moves[(size_t)(entry - SPECIAL)];
        if (known != DEAD) return known;
        Move move = automaton.moves[(size_t)(entry - SPECIAL)];
        move.target = renamed(move.target);
        move.last_target = renamed(move.last_target);
        if (move.push >= 0) move.push = symbol_number[(size_t)blocks.element[(size_t)(automaton.states + move.push)].set];
        Ints key{move.target, move.push, move.counter, move.last_target};
        key.insert(key.end(), move.sets.begin(), move.sets.end());
        key.insert(key.end(), move.last_sets.begin(), move.last_sets.end());
        auto [number, is_new] = moves.add(key);
        if (is_new) smaller.moves.push_back(move);
        return known = SPECIAL + number;
    };
    for (int32_t state : kept) {
        smaller.pop.push_back(automaton.pop[(size_t)state]);
        smaller.accepts.push_back(automaton.accepts[(size_t)state]);
        for (const Span &span : automaton.spans_of(state))
            smaller.add_span({span.low, span.end, span.entry >= SPECIAL ? renamed_move(span.entry) : renamed(span.entry)});
        smaller.end_state();
    }
    for (int32_t finish = 0; finish < smaller.finish_sets; finish++)
        for (int32_t symbol : symbols) smaller.go.push_back(renamed(automaton.go[(size_t)finish * automaton.symbols + symbol]));
    merge_classes(smaller);
    smaller.next.assign((size_t)smaller.states * (size_t)smaller.classes, DEAD);
    for (int32_t state = 0; state < smaller.states; state++)
        for (const Span &span : smaller.spans_of(state)) {
            auto row = smaller.next.begin() + (int64_t)state * smaller.classes;
            std::fill(row + span.low, row + span.end, span.entry);
        }
    return smaller;
}

} // namespace stepgraph
