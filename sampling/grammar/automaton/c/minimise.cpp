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

// Blocks of equivalent nodes: states, and symbols, which are numbered from `states` on. The first hash of a node depends on the bytes that
// it reads. A node with a unique hash is equivalent to no other. The rest is divided into blocks until all nodes of a block lead to the
// same blocks. The largest part of a divided block keeps its number; only nodes that lead to other parts are re-examined.
class Blocks {
public:
    explicit Blocks(const Automaton &automaton)
        : automaton(automaton), rows(automaton.classes), hashes((size_t)(automaton.states + automaton.symbols), 1), place(hashes.size()),
          block_of(hashes.size()) {
        Interned shapes;
        for (const Move &move : automaton.moves) {
            Move shape = move;
            shape.target = 0, shape.push = move.push >= 0, shape.last_target = move.last_target >= 0;
            shape_of.push_back(shapes.add(shape.ints(), Move::INTS).number);
        }
        find_blocks();
        for (int32_t node : elements) each_target(node, [&](int32_t to) { sources.add(to, node); });
        sources.sort(hashes.size());
        for (int32_t node : Ints(elements)) mark(node);
        while (!touched.empty()) {
            changed.clear();
            for (; !touched.empty(); touched.pop_back()) divide(touched.back());
            for (auto [node, block] : changed) set_block(node, block);
            for (auto [node, block] : changed)
                for (int32_t source : sources.of(node)) mark(source);
        }
        count = (int32_t)blocks.size();
        for (int32_t &block : block_of)
            if (block < 0) block = count++;
    }

    int32_t operator[](int32_t node) const { return block_of[(size_t)node]; }
    size_t size() const { return (size_t)count; }

private:
    struct Block { int32_t first, past, marked; }; // elements[first .. past]; the first `marked` of them are marked

    uint64_t hash_after(int32_t state) const { return state < 0 ? 3 : hashes[(size_t)state]; }

    uint64_t hash_after_entry(int32_t entry) const {
        if (entry < SPECIAL) return hash_after(entry);
        const Move &move = automaton.moves[(size_t)(entry - SPECIAL)];
        uint64_t pushed = mixed(hash_after(symbol_node(move)) + 1);
        uint64_t shape = mixed((uint64_t)shape_of[(size_t)(entry - SPECIAL)] + 1);
        return mixed(shape + hash_after(move.target)) + pushed + mixed(hash_after(move.last_target) + 2);
    }

    int32_t symbol_node(const Move &move) const { return move.push < 0 ? DEAD : automaton.states + move.push; }
    int32_t go(int32_t finish, int32_t symbol) const { return automaton.go[(size_t)finish * (size_t)automaton.symbols + (size_t)symbol]; }

    uint64_t hash_of(int32_t node) const {
        if (int32_t symbol = node - automaton.states; symbol >= 0) {
            uint64_t sum = 1;
            for (int32_t finish = 0; finish < automaton.finish_sets; finish++)
                sum += mixed(hash_after(go(finish, symbol)) + (uint64_t)finish);
            return mixed(sum);
        }
        uint64_t sum = (uint64_t)automaton.accepts[(size_t)node] << 32 | (uint32_t)automaton.pop[(size_t)node];
        return mixed(sum + rows.hash(automaton.spans_of(node), [&](int32_t entry) { return hash_after_entry(entry); }));
    }

    void set_block(int32_t node, int32_t block) {
        block_of[(size_t)node] = block;
        hashes[(size_t)node] = mixed((uint32_t)block);
    }

    void put(int32_t at, int32_t node) {
        elements[(size_t)at] = node;
        place[(size_t)node] = at;
    }

    // Makes one block of the nodes with each first hash. A node with a unique hash gets a unique negative number instead.
    void find_blocks() {
        Interned numbers;
        Ints number_of, sizes; // [nodes] number of the hash; [hashes] number of nodes
        for (int32_t node = 0; node < (int32_t)hashes.size(); node++) {
            uint64_t value = hash_of(node);
            const int32_t hash[] = {(int32_t)value, (int32_t)(value >> 32)};
            auto [number, is_new] = numbers.add(hash, std::size(hash));
            if (is_new) sizes.push_back(0);
            number_of.push_back(number);
            sizes[(size_t)number]++;
        }
        Ints block_of_hash(sizes.size(), -1);
        int32_t past = 0;
        for (size_t number = 0; number < sizes.size(); number++) {
            if (sizes[number] == 1) continue;
            block_of_hash[number] = (int32_t)blocks.size();
            blocks.push_back({past, past, 0});
            past += sizes[number];
        }
        elements.resize((size_t)past);
        for (int32_t node = 0; node < (int32_t)hashes.size(); node++) {
            int32_t block = block_of_hash[(size_t)number_of[(size_t)node]];
            set_block(node, block < 0 ? -2 - node : block);
            if (block >= 0) put(blocks[(size_t)block].past++, node);
        }
    }

    template <class Found> void each_target(int32_t node, const Found &found) const {
        auto find = [&](int32_t to) { if (to >= 0 && block_of[(size_t)to] >= 0) found(to); };
        if (node >= automaton.states) {
            for (int32_t finish = 0; finish < automaton.finish_sets; finish++) find(go(finish, node - automaton.states));
            return;
        }
        for (const Span &span : automaton.spans_of(node)) {
            const Move *move = span.entry < SPECIAL ? nullptr : &automaton.moves[(size_t)(span.entry - SPECIAL)];
            find(move ? move->target : span.entry);
            if (move) find(move->last_target), find(symbol_node(*move));
        }
    }

    void mark(int32_t node) {
        Block &block = blocks[(size_t)block_of[(size_t)node]];
        int32_t from = place[(size_t)node], to = block.first + block.marked;
        if (from < to || block.past - block.first == 1) return;
        put(from, elements[(size_t)to]);
        put(to, node);
        if (!block.marked++) touched.push_back(block_of[(size_t)node]);
    }

    int32_t block_after(int32_t state) const { return state < 0 ? -1 : block_of[(size_t)state]; }

    bool is_equal_entry(int32_t entry, int32_t other) const {
        if (entry < SPECIAL || other < SPECIAL) return std::max(entry, other) < SPECIAL && block_after(entry) == block_after(other);
        const Move &left = automaton.moves[(size_t)(entry - SPECIAL)], &right = automaton.moves[(size_t)(other - SPECIAL)];
        auto is_same = [&](int32_t after, int32_t with) { return block_after(after) == block_after(with); };
        return shape_of[(size_t)(entry - SPECIAL)] == shape_of[(size_t)(other - SPECIAL)] &&
            is_same(symbol_node(left), symbol_node(right)) &&
               is_same(left.target, right.target) && is_same(left.last_target, right.last_target);
    }

    bool is_equal(int32_t node, int32_t other) const {
        if (int32_t states = automaton.states; node >= states || other >= states) {
            if (std::min(node, other) < states) return false;
            for (int32_t finish = 0; finish < automaton.finish_sets; finish++)
                if (block_after(go(finish, node - states)) != block_after(go(finish, other - states))) return false;
            return true;
        }
        auto kind = [&](int32_t state) { return std::make_pair(automaton.accepts[(size_t)state], automaton.pop[(size_t)state]); };
        auto is_same = [&](int32_t entry, int32_t with) { return is_equal_entry(entry, with); };
        return kind(node) == kind(other) && rows.is_equal(automaton.spans_of(node), automaton.spans_of(other), is_same);
    }

    // Divides a block. Its nodes that are not marked lead to the same blocks as before, so they stay together.
    void divide(int32_t number) {
        Block block = blocks[(size_t)number];
        int32_t middle = block.first + block.marked;
        sorted.clear();
        for (int32_t at = block.first; at < middle; at++) sorted.push_back({hash_of(elements[(size_t)at]), elements[(size_t)at]});
        std::sort(sorted.begin(), sorted.end());
        starts.clear();
        for (size_t at = 0; at < sorted.size(); at++) {
            auto [hash, node] = sorted[at];
            if (!at || hash != sorted[at - 1].first || !is_equal(node, sorted[at - 1].second)) starts.push_back(block.first + (int32_t)at);
            put(block.first + (int32_t)at, node);
        }
        if (middle < block.past) starts.push_back(middle);
        starts.push_back(block.past);
        size_t largest = 0;
        for (size_t part = 1; part + 1 < starts.size(); part++)
            if (starts[part + 1] - starts[part] > starts[largest + 1] - starts[largest]) largest = part;
        blocks[(size_t)number] = {starts[largest], starts[largest + 1], 0};
        for (size_t part = 0; part + 1 < starts.size(); part++) {
            if (part == largest) continue;
            for (int32_t at = starts[part]; at < starts[part + 1]; at++) changed.push_back({elements[(size_t)at], (int32_t)blocks.size()});
            blocks.push_back({starts[part], starts[part + 1], 0});
        }
    }

    const Automaton &automaton;
    const Rows rows;
    Ints shape_of; // [moves] equal for moves that differ only in their targets and symbols
    std::vector<uint64_t> hashes; // [nodes] of block numbers; equal before `find_blocks`
    Ints elements, place; // nodes by block; [nodes] index in `elements`
    Ints block_of; // [nodes]
    std::vector<Block> blocks;
    ByState<int32_t> sources; // the nodes that lead to each node
    Ints touched; // blocks with marked nodes
    std::vector<std::pair<int32_t, int32_t>> changed; // nodes, and their new blocks
    std::vector<std::pair<uint64_t, int32_t>> sorted; // nodes by hash
    Ints starts; // starts of the parts of a block
    int32_t count = 0; // number of blocks
};

} // namespace

Ints equivalent_states(const Automaton &automaton) {
    Blocks blocks(automaton);
    Ints found;
    for (int32_t state = 0; state < automaton.states; state++) found.push_back(blocks[state]);
    return found;
}

Automaton minimise(Automaton automaton) {
    merge_classes(automaton);
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
