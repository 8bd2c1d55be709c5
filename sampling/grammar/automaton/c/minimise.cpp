// Minimisation of states and stack symbols together, by partition refinement.

#include "automaton.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace stepgraph {

namespace {

// Merges byte classes with equal columns: they are found by hashes of the columns, which are sums over spans, and compared.
void merge_classes(Automaton &automaton) {
    auto classes = (size_t)automaton.classes;
    std::vector<uint64_t> hashes(classes + 1, 0); // at first, the differences of adjacent columns
    for (int32_t state = 0; state < automaton.states; state++)
        for (const Span &span : automaton.spans_of(state)) {
            uint64_t hash = mixed((uint64_t)state << 32 | (uint32_t)span.entry);
            hashes[(size_t)span.low] += hash;
            hashes[(size_t)span.end] -= hash;
        }
    std::partial_sum(hashes.begin(), hashes.end(), hashes.begin());
    Ints same(classes), others; // the first class with the hash, and the classes that are not the first
    Ints shared_before(classes + 1, 0); // prefix sums over classes: 1 for a class with the hash of another
    std::unordered_map<uint64_t, int32_t> first;
    for (size_t at = 0; at < classes; at++) {
        same[at] = first.emplace(hashes[at], (int32_t)at).first->second;
        if (same[at] == (int32_t)at) continue;
        others.push_back((int32_t)at);
        shared_before[at + 1] = shared_before[(size_t)same[at] + 1] = 1;
    }
    if (others.empty()) return;
    std::partial_sum(shared_before.begin(), shared_before.end(), shared_before.begin());
    Ints row(classes);
    for (int32_t state = 0; state < automaton.states; state++) {
        if (!automaton.sum_of(state, shared_before)) continue; // most states read other classes only
        std::fill(row.begin(), row.end(), DEAD);
        for (const Span &span : automaton.spans_of(state)) std::fill(row.begin() + span.low, row.begin() + span.end, span.entry);
        for (int32_t at : others)
            if (row[(size_t)at] != row[(size_t)same[(size_t)at]]) same[(size_t)at] = at;
    }
    Ints kept_before(classes + 1, 0), renamed(classes); // kept_before: number of remaining classes before each
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

// Blocks of equivalent nodes: states, and symbols, which are numbered from `states` on. At first there is one block. Blocks are divided by
// the hashes of their nodes until all nodes of a block lead to the same blocks. A hash is a sum over the entries of a node, so that it is
// updated, not computed again, if a target gets another block. The largest part of a divided block keeps its number.
class Blocks {
public:
    explicit Blocks(const Automaton &automaton)
        : automaton(automaton), rows(automaton.classes), hashes((size_t)(automaton.states + automaton.symbols), 0), elements(hashes.size()),
          place(hashes.size()), block_of(hashes.size(), 0), blocks{{0, (int32_t)hashes.size(), 0}} {
        Interned shapes;
        for (const Move &move : automaton.moves) {
            Move shape = move;
            shape.target = 0, shape.push = move.push >= 0, shape.last_target = move.last_target >= 0;
            shape_of.push_back(shapes.add(shape.ints(), Move::INTS).number);
        }
        std::iota(elements.begin(), elements.end(), 0);
        std::iota(place.begin(), place.end(), 0);
        for (int32_t state = 0; state < automaton.states; state++) {
            hashes[(size_t)state] = mixed((uint64_t)automaton.accepts[(size_t)state] + 1);
            for (const Span &span : automaton.spans_of(state)) {
                uint64_t factor = rows.factor(span);
                if (span.entry < SPECIAL) {
                    add_target(state, span.entry, factor);
                    continue;
                }
                const Move &move = automaton.moves[(size_t)(span.entry - SPECIAL)];
                hashes[(size_t)state] += factor * mixed((uint64_t)shape_of[(size_t)(span.entry - SPECIAL)] + 1);
                add_target(state, move.target, factor * mixed(1));
                add_target(state, move.last_target, factor * mixed(2));
                add_target(state, symbol_node(move), factor * mixed(3));
            }
        }
        for (int32_t symbol = 0; symbol < automaton.symbols; symbol++)
            for (int32_t finish = 0; finish < automaton.finish_sets; finish++)
                add_target(automaton.states + symbol, go(finish, symbol), mixed((uint64_t)finish + 1));
        sources.sort(hashes.size());
        divide_by(automaton.pop);
    }

    // Divides blocks until states of a block also have the same kind.
    void divide_by(const Ints &kinds) {
        for (int32_t node = 0; node < (int32_t)hashes.size(); node++) {
            if (node < automaton.states) hashes[(size_t)node] += mixed((uint32_t)kinds[(size_t)node]);
            mark(node);
        }
        while (!touched.empty()) {
            changed.clear();
            for (; !touched.empty(); touched.pop_back()) divide(touched.back());
            for (auto &[node, block] : changed) std::swap(block_of[(size_t)node], block);
            for (auto [node, before] : changed) {
                uint64_t change = hash_of(block_of[(size_t)node]) - hash_of(before);
                for (const Source &source : sources.of(node)) {
                    hashes[(size_t)source.node] += source.weight * change;
                    mark(source.node);
                }
            }
        }
        for (const Block &block : blocks)
            for (int32_t at = block.first + 1; at < block.past; at++)
                if (!is_equal(elements[(size_t)at], elements[(size_t)block.first], kinds)) throw Unfit("its states have equal hashes");
    }

    int32_t operator[](int32_t node) const { return block_of[(size_t)node]; }
    size_t size() const { return blocks.size(); }
    Ints of_states() const { return Ints(block_of.begin(), block_of.begin() + automaton.states); }

private:
    struct Block { int32_t first, past, marked; }; // elements[first .. past]; the first `marked` of them are marked
    struct Source { int32_t node; uint64_t weight; }; // weight: the factor of the target's block in the hash of the node

    static uint64_t hash_of(int32_t block) { return mixed((uint64_t)block + 1); }

    void add_target(int32_t node, int32_t to, uint64_t weight) {
        if (to < 0) return;
        sources.add(to, {node, weight});
        hashes[(size_t)node] += weight * hash_of(0);
    }

    int32_t symbol_node(const Move &move) const { return move.push < 0 ? DEAD : automaton.states + move.push; }
    int32_t go(int32_t finish, int32_t symbol) const { return automaton.go[(size_t)finish * (size_t)automaton.symbols + (size_t)symbol]; }

    void put(int32_t at, int32_t node) {
        elements[(size_t)at] = node;
        place[(size_t)node] = at;
    }

    void mark(int32_t node) {
        Block &block = blocks[(size_t)block_of[(size_t)node]];
        if (block.past - block.first == 1) return;
        int32_t from = place[(size_t)node], to = block.first + block.marked;
        if (from < to) return;
        put(from, elements[(size_t)to]);
        put(to, node);
        if (!block.marked++) touched.push_back(block_of[(size_t)node]);
    }

    bool is_same(int32_t state, int32_t other) const {
        return std::min(state, other) < 0 ? state == other : block_of[(size_t)state] == block_of[(size_t)other];
    }

    bool is_equal_entry(int32_t entry, int32_t other) const {
        if (entry < SPECIAL || other < SPECIAL) return std::max(entry, other) < SPECIAL && is_same(entry, other);
        const Move &left = automaton.moves[(size_t)(entry - SPECIAL)], &right = automaton.moves[(size_t)(other - SPECIAL)];
        return shape_of[(size_t)(entry - SPECIAL)] == shape_of[(size_t)(other - SPECIAL)] && is_same(left.target, right.target) &&
               is_same(left.last_target, right.last_target) && is_same(symbol_node(left), symbol_node(right));
    }

    bool is_equal(int32_t node, int32_t other, const Ints &kinds) const {
        if (int32_t states = automaton.states; node >= states || other >= states) {
            if (std::min(node, other) < states) return false;
            for (int32_t finish = 0; finish < automaton.finish_sets; finish++)
                if (!is_same(go(finish, node - states), go(finish, other - states))) return false;
            return true;
        }
        auto is_equal_to = [&](int32_t entry, int32_t with) { return is_equal_entry(entry, with); };
        return automaton.accepts[(size_t)node] == automaton.accepts[(size_t)other] && kinds[(size_t)node] == kinds[(size_t)other] &&
               rows.is_equal(automaton.spans_of(node), automaton.spans_of(other), is_equal_to);
    }

    // Divides a block. Its nodes that are not marked lead to the same blocks as before, so they stay together.
    void divide(int32_t number) {
        const Block block = blocks[(size_t)number];
        const int32_t middle = block.first + block.marked;
        auto hash_at = [&](int32_t at) { return hashes[(size_t)elements[(size_t)at]]; };
        auto begin = elements.begin() + block.first;
        std::sort(begin, begin + block.marked, [&](int32_t left, int32_t right) { return hashes[(size_t)left] < hashes[(size_t)right]; });
        parts.clear();
        for (int32_t at = block.first; at < middle; at++) {
            place[(size_t)elements[(size_t)at]] = at;
            if (at == block.first || hash_at(at) != hash_at(at - 1)) parts.push_back({at, at, 0});
            parts.back().past++;
        }
        if (middle < block.past) parts.push_back({middle, block.past, 0});
        auto is_smaller = [](const Block &left, const Block &right) { return left.past - left.first < right.past - right.first; };
        auto largest = std::max_element(parts.begin(), parts.end(), is_smaller);
        blocks[(size_t)number] = *largest;
        parts.erase(largest);
        for (const Block &part : parts) {
            for (int32_t at = part.first; at < part.past; at++) changed.push_back({elements[(size_t)at], (int32_t)blocks.size()});
            blocks.push_back(part);
        }
    }

    const Automaton &automaton;
    const Rows rows;
    Ints shape_of; // [moves] equal for moves that differ only in their targets and symbols
    std::vector<uint64_t> hashes; // [nodes]
    Ints elements, place; // nodes by block; [nodes] index in `elements`
    Ints block_of; // [nodes]
    std::vector<Block> blocks;
    ByState<Source> sources; // the nodes that lead to each node
    Ints touched; // blocks with marked nodes
    std::vector<std::pair<int32_t, int32_t>> changed; // nodes, and their new blocks
    std::vector<Block> parts; // of the block that is being divided
};

} // namespace

std::array<Ints, 2> equivalent_states(const Automaton &automaton, const std::function<Ints(const Ints &)> &kinds) {
    Blocks blocks(automaton);
    Ints first = blocks.of_states();
    blocks.divide_by(kinds(first));
    return {first, blocks.of_states()};
}

Automaton minimise(Automaton automaton) {
    Blocks blocks(automaton);
    Ints number(blocks.size(), -1), kept;
    auto keep = [&](int32_t state) {
        if (state < 0) return;
        int32_t &known = number[blocks[state]];
        if (known < 0) known = (int32_t)kept.size(), kept.push_back(state);
    };
    keep(automaton.start); // breadth first, so that successive states are close in memory
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
    Ints symbol_number(blocks.size(), -1), symbols;
    for (int32_t symbol = 0; symbol < automaton.symbols; symbol++) {
        int32_t &known = symbol_number[blocks[automaton.states + symbol]];
        if (known < 0) known = (int32_t)symbols.size(), symbols.push_back(symbol);
    }
    auto renamed = [&](int32_t state) { return state < 0 ? DEAD : number[blocks[state]]; };
    Automaton smaller;
    smaller.states = (int32_t)kept.size();
    smaller.classes = automaton.classes;
    smaller.symbols = (int32_t)symbols.size();
    smaller.finish_sets = automaton.finish_sets;
    smaller.counters = automaton.counters;
    smaller.class_of = automaton.class_of;
    smaller.spans.reserve(automaton.spans.size());
    Interned moves;
    Ints renamed_moves(automaton.moves.size(), DEAD); // as entries
    auto renamed_move = [&](int32_t entry) {
        int32_t &known = renamed_moves[(size_t)(entry - SPECIAL)];
        if (known != DEAD) return known;
        Move move = automaton.moves[(size_t)(entry - SPECIAL)];
        move.target = renamed(move.target);
        move.last_target = renamed(move.last_target);
        if (move.push >= 0) move.push = symbol_number[(size_t)blocks[automaton.states + move.push]];
        auto [number, is_new] = moves.add(move.ints(), Move::INTS);
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
