// See masks.h. The mask row of a state is found by walking trees of tokens from it. Optimisations: tokens of plain text have separate
// trees, which are not walked inside strings, where their rows follow from the number of characters; few tokens contain quotes, and states
// that differ only after a quote share the tokens without quotes; a subtree is walked once for all states that accept the same texts up to
// its height; a subtree is not walked if all texts of its bytes are legal, as in names and numbers; and states with equal tokens share a
// row before its words are written. The legality of a token that leaves the part of the grammar in which it began depends on the stack; it
// is listed unless no stack allows it.

#include "masks.h"

#include "continuations.h"
#include "levels.h"
#include "sparse_row.h"
#include "walk_states.h"

#include <cstdlib>
#include <deque>
#include <new>
#include <numeric>
#include <unordered_map>

namespace stepgraph {

namespace {

constexpr int32_t SHARED_TOKENS = 100; // a subtree with as many tokens is walked once for several states
// Steps before equivalent states are searched for, and before subtrees are shared: both take longer if few states are equivalent.
constexpr int64_t MOVES_PER_STEP = 8, STEPS_PER_MOVE = 2;
constexpr size_t MAX_BELOW = 8'000'000; // in words
constexpr size_t LARGE_PART = 24, MAX_LARGE_PARTS = 256; // size in `below_bits`; kept parts: 8 MB at 131,072 tokens

class Masks {
public:
    Masks(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits)
        : automaton(automaton), vocabulary(vocabulary), limits(limits),
          narrow(std::max((size_t)automaton.states, automaton.moves.size() + 1) <= 1 << 15), bytes_of(automaton.bytes_by_class()),
          walk_states(walk_states_of(automaton)), plain_row(plain_rows(automaton, vocabulary.longest_plain, walk_states)),
          levels(automaton), continuations(automaton), row((size_t)vocabulary.words), large((size_t)vocabulary.words),
          ordered(vocabulary.starts.size() / 32 + 1), pushed((size_t)vocabulary.longest + 1) {
        auto pop = std::find_if(automaton.pop.begin(), automaton.pop.end(), [](int32_t finish_set) { return finish_set >= 0; });
        if (pop != automaton.pop.end()) first_pop = (int32_t)(pop - automaton.pop.begin());
        for (size_t part = 0; part < NUM_PARTS; part++) {
            level_of[part] = std::min((size_t)PARTS[part].quotes, levels.size() - 1);
            below_of[part].assign(levels[level_of[part]].first.size(), -1);
            for (const auto &bytes : bytes_of) {
                first_before[part].push_back((int32_t)first_nodes[part].size());
                for (uint8_t byte : bytes)
                    if (int32_t node = vocabulary.tries[part].first_of[byte]) first_nodes[part].push_back(node);
            }
            first_before[part].push_back((int32_t)first_nodes[part].size());
        }
    }

    Image image() {
        row_of.assign(automaton.states, -1);
        crossing.resize(automaton.symbols ? automaton.states : 0);
        for (int32_t state = 0; state < automaton.states; state++) {
            if (automaton.pop[state] >= 0) continue; // a text is never in it
            int64_t moves = (int64_t)levels[0].first.size() * automaton.classes;
            if (levels[0].coarser.empty() && steps > moves / MOVES_PER_STEP) levels.find_coarser();
            shares_parts = steps > STEPS_PER_MOVE * moves;
            int32_t base = plain_row[state] > 0 ? -2 - plain_row[state] : -1;
            if (automaton.symbols) crossed = &crossing[state];
            std::array<int32_t, NUM_PARTS + 2> parts; // all that determines the row
            for (size_t part = 0; part < NUM_PARTS; part++) {
                parts[part] = -1;
                if (PARTS[part].is_plain && base != -1) continue;
                const Below &found = below[(size_t)part_of(state, part)];
                parts[part] = found.bits;
                if (automaton.symbols) append_crossed(found);
            }
            parts[NUM_PARTS] = automaton.accepts[state], parts[NUM_PARTS + 1] = base;
            auto [number, is_new] = parts_of_rows.add(parts.data(), parts.size());
            row_of[state] = number;
            if (!is_new) continue;
            for (size_t part = 0; part < NUM_PARTS; part++)
                if (parts[part] >= 0) set_part(part, parts[part]);
            if (automaton.accepts[state])
                for (int32_t stop : vocabulary.stops) row.add((uint32_t)stop);
            add_row(base);
        }
        return assembled();
    }

private:
    struct Range { size_t begin, end; };
    struct Below { // tokens below a node, or of a whole tree
        int32_t bits; // number in below_bits
        Range crossed; // range of below_crossed
        int32_t followed; // number of bytes on which the tokens depend
    };

    // The tokens of one tree that are legal in a state, as a number in `below`. It is shared by the states of a class, and by classes that
    // `coarser` does not distinguish for texts of the bytes on which the tokens depend.
    int32_t part_of(int32_t state, size_t part) {
        const Level &level = levels[level_of[part]];
        int32_t class_id = level.class_of[state];
        int32_t &found = below_of[part][(size_t)class_id];
        if (found >= 0) return found;
        auto &known = parts_like[part];
        for (size_t bytes = 0; bytes < known.size(); bytes++)
            if (!known[bytes].empty() && (found = known[bytes][(size_t)level.coarser[bytes][(size_t)class_id]]) >= 0) return found;
        followed = 1; // also in a state that reads no byte
        const Trie &trie = vocabulary.tries[part];
        if (!automaton.sum_of(state, first_before[part])) return found = none >= 0 ? none : none = keep_below(0, 0, [] {});
        found = keep_below(0, trie.tokens.size(), [&] {
            steps += trie.nodes[Trie::ROOT + 1].first_child - 1; // the number of children of the root
            const Ints &before = first_before[part];
            for (const Span &span : automaton.spans_of(state)) // most states read few bytes
                for (int32_t at = before[(size_t)span.low]; at < before[(size_t)span.end]; at++)
                    follow(trie, first_nodes[part][(size_t)at], 1, span.entry, 0);
        });
        if (level.coarser.empty() || (followed >= (int32_t)level.coarser.size() && !level.is_final)) return found;
        size_t bytes = std::min((size_t)followed, level.coarser.size() - 1);
        if (known.size() <= bytes) known.resize(bytes + 1);
        known[bytes].resize((size_t)level.coarser_classes, -1);
        return known[bytes][(size_t)level.coarser[bytes][(size_t)class_id]] = found;
    }

    // Find the tokens below a node of a tree, after `size` bytes, in a state without pushed symbols. False if they are not known and there
    // is no room for them.
    bool add_below(const Trie &trie, int32_t node, int32_t size, int32_t state) {
        size_t part = (size_t)(&trie - vocabulary.tries.data()), height = (size_t)trie.nodes[(size_t)node].height;
        const Level &level = levels[level_of[part]];
        int32_t class_id = level.class_of[state];
        bool by_height = !level.coarser.empty() && (height < level.coarser.size() || level.is_final);
        if (by_height) class_id = -1 - level.coarser[std::min(height, level.coarser.size() - 1)][(size_t)class_id];
        auto &known = below_node[part];
        uint64_t key = (uint64_t)node << 32 | (uint32_t)class_id;
        auto at = known.find(key);
        if (at == known.end()) {
            if (below_bits.total() + below_crossed.size() > MAX_BELOW) return false;
            int32_t before = std::exchange(followed, 0);
            auto begin = (size_t)trie.nodes[(size_t)node].below_token, end = (size_t)trie.nodes[(size_t)node].end_token;
            at = known.emplace(key, keep_below(begin, end, [&] { walk_children(trie, node, size, state, 0); })).first;
            followed = before;
        }
        const Below &found = below[(size_t)at->second];
        followed = std::max(followed, found.followed);
        ordered.set(below_bits.of(found.bits));
        append_crossed(found);
        return true;
    }

    // Stores the tokens from `first` to before `past_last` that `walk` finds, without those found so far. Returns their number in `below`.
    template <class Walk> int32_t keep_below(size_t first, size_t past_last, const Walk &walk) {
        if (level == spares.size()) spares.emplace_back(ordered.bits.size());
        SparseRow &spare = spares[level++];
        std::swap(ordered, spare);
        Ints found, *outer = std::exchange(crossed, &found);
        walk();
        if (steps > limits.steps) exceeded("steps", limits.steps);
        crossed = outer;
        Slice<int32_t> pairs = ordered.take(first, past_last);
        size_t begin = below_crossed.size();
        below_crossed.insert(below_crossed.end(), found.begin(), found.end());
        int32_t bits = below_bits.add(pairs.first, pairs.size()).number;
        std::swap(ordered, spare);
        level--;
        below.push_back({bits, {begin, below_crossed.size()}, followed});
        return (int32_t)below.size() - 1;
    }

    void append_crossed(const Below &found) {
        auto begin = below_crossed.begin();
        crossed->insert(crossed->end(), begin + (int64_t)found.crossed.begin, begin + (int64_t)found.crossed.end);
    }

    // Set the tokens of a tree, given by their number in `below_bits`. Many rows have the same large part: its words are kept.
    void set_part(size_t part, int32_t number) {
        Slice<int32_t> pairs = below_bits.of(number);
        auto add_to = [&](SparseRow &to) {
            for (const int32_t *at = pairs.first; at < pairs.last; at += 2)
                for (auto bits = (uint32_t)at[1]; bits; bits &= bits - 1)
                    to.add((uint32_t)vocabulary.tries[part].tokens[(size_t)at[0] * 32 + (size_t)__builtin_ctz(bits)]);
        };
        if (pairs.size() < LARGE_PART) return add_to(row);
        if (large_parts.size() == MAX_LARGE_PARTS) large_parts.clear();
        Ints &words = large_parts[(uint64_t)part << 32 | (uint32_t)number];
        if (words.empty()) {
            add_to(large);
            Slice<int32_t> found = large.take(0, 32 * (size_t)vocabulary.words);
            words.assign(found.begin(), found.end());
        }
        row.set({words.data(), words.data() + words.size()});
    }

    // Set the tokens from `begin` to before `end`.
    void set_range(int32_t begin, int32_t end) {
        for (int32_t word = begin / 32; word * 32 < end; word++) {
            uint32_t bits = ~0u;
            if (word == begin / 32) bits &= ~0u << (begin % 32);
            if (end - word * 32 < 32) bits &= ~(~0u << (end % 32));
            ordered.set((uint32_t)word, bits);
        }
    }

    // Find the tokens below a node at `size` bytes that may continue a text in `state`: those that are legal, and those whose legality
    // depends on the stack. `top`: index in `pushed` of the top of the stack, 0 if it is empty.
    void walk_children(const Trie &trie, int32_t node, int32_t size, int32_t state, int32_t top) {
        int32_t begin = trie.nodes[(size_t)node].first_child, end = trie.nodes[(size_t)node + 1].first_child;
        followed = std::max(followed, size + 1);
        steps += end - begin;
        const int32_t *next = automaton.next.data() + (size_t)state * (size_t)automaton.classes, *leaf_token = trie.leaf_token.data();
        const uint8_t *bytes = trie.bytes.data();
        for (int32_t child = begin; child < end; child++) {
            int32_t entry = next[automaton.class_of[bytes[child]]];
            if (entry < 0) continue;
            if (!is_plain(entry)) follow(trie, child, size + 1, entry, top);
            else if (int32_t leaf = leaf_token[child]; leaf >= 0) ordered.add((uint32_t)leaf);
            else visit(trie, child, size + 1, entry, top);
        }
    }

    bool is_plain(int32_t entry) const { return entry < first_pop || (entry < SPECIAL && walk_states[(size_t)entry].pop < 0); }

    // Adds the tokens at a node and below it; `entry` leads to the node. `size`: number of bytes up to the node.
    void follow(const Trie &trie, int32_t number, int32_t size, int32_t entry, int32_t top) {
        int32_t to = automaton.target_of(entry), pop = -1;
        if (int32_t push = automaton.push_of(entry); push >= 0) {
            pushed[(size_t)size] = {push, top, (top ? pushed[(size_t)top].size : 0) + 1};
            top = size;
            pushes = std::max(pushes, pushed[(size_t)top].size);
        }
        for (; to >= 0 && (pop = walk_states[(size_t)to].pop) >= 0 && top; top = pushed[(size_t)top].below)
            to = automaton.go[(size_t)pop * (size_t)automaton.symbols + (size_t)pushed[(size_t)top].symbol];
        if (to < 0) return;
        if (pop < 0) return visit(trie, number, size, to, top);
        const Trie::Node &node = trie.nodes[(size_t)number]; // the move leaves a part that began before the token
        for (int32_t at = node.first_token; at < node.below_token; at++) ordered.add((uint32_t)at);
        if (node.below_token < node.end_token) add_crossing(trie, number, continuations.after_part(pop));
    }

    // Adds the tokens at a node, which is reached in the state `to`, and below it.
    void visit(const Trie &trie, int32_t number, int32_t size, int32_t to, int32_t top) {
        for (;; size++) { // most nodes have one child
            const Trie::Node &node = trie.nodes[(size_t)number];
            for (int32_t at = node.first_token; at < node.below_token; at++) ordered.add((uint32_t)at);
            if (node.below_token == node.end_token) return;
            const WalkState &step = walk_states[(size_t)to];
            number = node.first_child;
            auto is_inside = [&] { return (trie.bytes[(size_t)number] & 0xC0) == 0x80; }; // a character: `surely` begins after one
            bool is_closed = node.height <= step.closed && !(node.groups & ~step.groups);
            if (is_closed || (trie.is_plain && node.height <= step.surely && !is_inside())) {
                followed = std::max(followed, size + node.height);
                return set_range(node.below_token, node.end_token);
            }
            auto parent = (int32_t)(&node - trie.nodes.data());
            bool is_shared = shares_parts && !top && node.end_token - node.below_token >= SHARED_TOKENS;
            if (is_shared && add_below(trie, parent, size, to)) return;
            if ((&node)[1].first_child - number > 1) return walk_children(trie, parent, size, to, top);
            followed = std::max(followed, size + 1);
            steps++;
            int32_t entry = automaton.entry_of(to, automaton.class_of[trie.bytes[(size_t)number]]);
            if (entry < 0) return;
            if (!is_plain(entry)) return follow(trie, number, size + 1, entry, top);
            to = entry;
        }
    }

    // Adds the tokens below a node that some stack may allow. `set`: in `continuations`, at the node.
    void add_crossing(const Trie &trie, int32_t number, int32_t set) {
        const Trie::Node &node = trie.nodes[(size_t)number];
        auto add_tokens = [&](int32_t begin, int32_t end) {
            crossed->insert(crossed->end(), trie.tokens.begin() + begin, trie.tokens.begin() + end);
        };
        if (set == Continuations::ANY) return add_tokens(node.below_token, node.end_token);
        for (int32_t child = node.first_child; child < trie.nodes[(size_t)number + 1].first_child; child++) {
            int32_t next = continuations.next(set, automaton.class_of[trie.bytes[(size_t)child]]);
            if (next == Continuations::NONE) continue;
            add_tokens(trie.nodes[(size_t)child].first_token, trie.nodes[(size_t)child].below_token);
            add_crossing(trie, child, next);
        }
    }

    // Adds the row that was built, as changes of a base row or as a dense row.
    void add_row(int32_t base) {
        const int32_t *plain = base == -1 ? nullptr : vocabulary.plain.data() + (size_t)(-2 - base) * (size_t)vocabulary.words;
        bool any_text = plain && std::any_of(plain, plain + vocabulary.words, [](int32_t word) { return word != 0; });
        Slice<int32_t> pairs = row.take(0, 32 * (size_t)vocabulary.words);
        size_t words = (size_t)vocabulary.words, begin = change_word.size(), past = begin;
        change_word.resize(begin + pairs.size() / 2), change_value.resize(change_word.size());
        for (const int32_t *at = pairs.first; at < pairs.last; at += 2) {
            int32_t before = plain ? plain[at[0]] : 0, bits = at[1] | before;
            if (!any_text) any_text = (bits & ~vocabulary.stop_words[(size_t)at[0]]) != 0;
            change_word[past] = at[0], change_value[past] = bits;
            past += bits != before; // not words that equal the base
        }
        status_of.push_back(any_text ? 1 : past == begin ? 4 : 2); // MaskStatus OK, DEAD_END, COMPLETE
        change_start.push_back((int32_t)begin);
        bool is_dense = (past - begin) * 4 > words; // a change takes two words, and longer to apply
        base_of.push_back(is_dense ? (int32_t)(dense.size() / words) : base);
        if (is_dense) {
            dense.resize(dense.size() + words, 0);
            int32_t *to = &dense[dense.size() - words];
            if (plain) std::copy_n(plain, words, to);
            while (past > begin) past--, to[change_word[past]] = change_value[past];
        }
        change_word.resize(past), change_value.resize(past);
        check_size(4 * (int64_t)(dense.size() + 2 * change_word.size() + automaton.next.size() / (narrow ? 2 : 1)));
    }

    // An upper bound of the symbols that a legal token has on the stack at a time. After a token has left the part in which it began, its
    // moves are not known, so every byte for which any move pushes is counted. No memory depends on it; above the limit of a lane,
    // another one follows the grammar. Of SmolLM2's vocabulary it is 2 for any JSON and 3 for JSON with regular expressions.
    int32_t most_pushes() const {
        std::vector<char> may_push(automaton.classes, 0), seen(vocabulary.starts.size(), 0);
        for (const Span &span : automaton.spans)
            if (automaton.push_of(span.entry) >= 0) std::fill_n(&may_push[span.low], span.end - span.low, 1);
        int32_t most = pushes;
        for (const Ints &tokens : crossing)
            for (int32_t token : tokens) {
                if (seen[token]) continue;
                seen[token] = 1;
                auto pushing = [&](uint8_t byte) { return may_push[automaton.class_of[byte]]; };
                const uint8_t *text = vocabulary.text.data();
                most = std::max(most, (int32_t)std::count_if(text + vocabulary.starts[token], text + vocabulary.starts[token + 1],
                    pushing));
            }
        if (most > IMAGE_MAX_PUSHES) throw Unfit("a token that opens more than " + std::to_string(IMAGE_MAX_PUSHES) + " nested parts");
        return most;
    }

    void check_size(int64_t bytes) const {
        if (bytes > limits.bytes) exceeded("bytes", limits.bytes);
    }

    size_t packed_size() const { return narrow ? (automaton.next.size() + 1) / 2 : automaton.next.size(); }
    void pack_entries(int32_t *entries) const { // IMAGE_NEXT
        const Ints &next = automaton.next;
        auto renumbered = [](int32_t entry) { return (uint32_t)(entry >= SPECIAL ? SPECIAL - 2 - entry : entry); };
        if (!narrow) std::transform(next.begin(), next.end(), entries, renumbered);
        for (size_t at = 0; narrow && at < next.size() / 2; at++)
            entries[at] = (int32_t)((renumbered(next[2 * at]) & 0xFFFF) | renumbered(next[2 * at + 1]) << 16);
        if (narrow && next.size() % 2) entries[next.size() / 2] = (int32_t)(renumbered(next.back()) & 0xFFFF);
    }

    Image assembled() {
        change_start.push_back((int32_t)change_word.size());
        Ints class_of(automaton.class_of.begin(), automaton.class_of.end()), leave = automaton.pop;
        Ints byte_of, moves, cross_start, cross;
        for (int32_t state = 0; state < automaton.states; state++)
            if (automaton.accepts[state]) leave[state] = -2;
        for (const auto &bytes : bytes_of) byte_of.push_back(bytes.size() == 1 ? bytes[0] : -1);
        for (const Move &move : automaton.moves) moves.insert(moves.end(), move.ints(), move.ints() + Move::INTS);
        std::array<int32_t, (IMAGE_HEADER + 3) / 4 * 4> header{}; // the rows of states, which follow, are at a multiple of four
        for (const Ints &tokens : crossing) {
            cross_start.push_back((int32_t)cross.size());
            cross.insert(cross.end(), tokens.begin(), tokens.end());
        }
        cross_start.push_back((int32_t)cross.size());
        Ints rows_of; // image_row of each state; a text is never in a state without a row
        for (int32_t row : row_of) {
            if (row < 0) rows_of.insert(rows_of.end(), sizeof(image_row) / sizeof(int32_t), -1);
            else for (int32_t field : {base_of[row], status_of[row], change_start[row], change_start[row + 1]}) rows_of.push_back(field);
        }
        const std::pair<int, const Ints *> tables[] = {
            {IMAGE_ROW_OF, &rows_of}, {IMAGE_DENSE, &dense}, {IMAGE_CLASS_OF, &class_of}, {IMAGE_BYTE_OF, &byte_of},
            {IMAGE_NEXT, nullptr}, {IMAGE_MOVES, &moves}, {IMAGE_LEAVE, &leave}, {IMAGE_RETURN, &automaton.go},
            {IMAGE_CHANGE_WORD, &change_word}, {IMAGE_CHANGE_VALUE, &change_value}, {IMAGE_CROSS_START, &cross_start},
            {IMAGE_CROSS, &cross},
        };
        auto size = (int64_t)header.size();
        for (auto &[field, values] : tables) {
            header[(size_t)field] = (int32_t)size;
            check_size(4 * (size += (int64_t)(values ? values->size() : packed_size())));
        }
        header[IMAGE_FORMAT] = IMAGE_VERSION;
        header[IMAGE_SIZE] = (int32_t)size;
        header[IMAGE_STATES] = header[IMAGE_FREE] = header[IMAGE_LIMITED] = automaton.states;
        header[IMAGE_CLASSES] = automaton.classes;
        header[IMAGE_SYMBOLS] = automaton.symbols;
        header[IMAGE_FINISH_SETS] = automaton.finish_sets;
        header[IMAGE_START] = automaton.start;
        std::copy(automaton.counters.begin(), automaton.counters.end(), &header[IMAGE_START_COUNTERS]);
        header[IMAGE_DEPTH] = automaton.symbols ? (int32_t)limits.depth : 0;
        header[IMAGE_PUSHES] = automaton.symbols ? most_pushes() : 0;
        header[IMAGE_NARROW] = narrow;
        header[IMAGE_LIMIT] = INT32_MAX;
        Image image((int32_t *)malloc((size_t)size * sizeof(int32_t)), free);
        if (!image) throw std::bad_alloc();
        std::copy(header.begin(), header.end(), image.get());
        pack_entries(image.get() + header[IMAGE_NEXT]);
        for (auto &[field, values] : tables)
            if (values) std::copy(values->begin(), values->end(), image.get() + header[(size_t)field]);
        return image;
    }

    const Automaton &automaton;
    const Vocabulary &vocabulary;
    const Limits &limits;
    const bool narrow; // whether 16 bits hold each entry of IMAGE_NEXT
    std::vector<std::vector<uint8_t>> bytes_of; // [classes]
    std::vector<WalkState> walk_states; // [states]
    const Ints plain_row; // [states]
    int32_t first_pop = SPECIAL; // the first state that is left at once
    Levels levels;
    Ints row_of; // [states]
    std::vector<Ints> crossing; // [states]
    std::array<size_t, NUM_PARTS> level_of{};
    std::array<Ints, NUM_PARTS> first_nodes, first_before; // the children of the root by class; [classes + 1] where those of each begin
    std::array<Ints, NUM_PARTS> below_of; // [classes of the level] number in `below`, or -1
    std::array<std::vector<Ints>, NUM_PARTS> parts_like; // [bytes][class] number in `below` of a part that depends on so many bytes, or -1
    Interned parts_of_rows; // the parts, whether the text may end, and the base
    int32_t followed = 0; // number of bytes of a token on which the part that is being walked depends
    bool shares_parts = false; // whether tokens below a node are found for several states at once
    std::vector<Below> below;
    int32_t none = -1; // number in `below` of no tokens
    std::array<std::unordered_map<uint64_t, int32_t>, NUM_PARTS> below_node; // by node and class
    Interned below_bits; // pairs of word index and bits of `ordered`
    Continuations continuations;
    Ints below_crossed, *crossed = nullptr; // tokens whose legality depends on the stack; of the state or the part that is being walked
    std::deque<SparseRow> spares; // one for each nested call of `keep_below`
    size_t level = 0; // number of nested calls of `keep_below`
    SparseRow row, large; // being built: a row, and a large part of one
    std::unordered_map<uint64_t, Ints> large_parts; // by part and number in `below_bits`: pairs of word index and bits
    SparseRow ordered; // the tokens of a tree, in its order: those below a node are adjacent
    struct Pushed { int32_t symbol, below, size; }; // a symbol, the index of the symbol below it, and the stack size
    std::vector<Pushed> pushed; // [bytes] indexed by the byte that pushed the symbol
    Ints base_of, status_of, change_start; // fields of image_row, by row
    Ints change_word, change_value, dense; // tables of the image
    int64_t steps = 0;
    int32_t pushes = 0; // maximum number of symbols that the tokens walked so far had on the stack at a time
};

} // namespace

Image build_image(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits) {
    return Masks(automaton, vocabulary, limits).image();
}

} // namespace stepgraph
