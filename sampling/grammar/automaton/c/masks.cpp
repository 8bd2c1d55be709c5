// See masks.h. The mask row of a state is found by walking trees of tokens from it. Optimisations: tokens of plain text have separate
// trees, which are not walked inside strings, where their rows follow from the number of characters; few tokens contain quotes, and states
// that differ only after a quote share the tokens without quotes; a subtree is walked once for all states that accept the same texts up to
// its height; a subtree is not walked if all texts of its bytes are legal, as in names and numbers; and states with equal tokens share a
// row before its words are written. The legality of a token that leaves the part of the grammar in which it began depends on the stack; it
// is listed unless no stack allows it.

#include "masks.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <new>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace stepgraph {

// Plain characters are those that may occur unescaped anywhere in a JSON string.
struct PlainText {
    static constexpr int STATES = 10; // state 0: between characters
    int8_t next[STATES][256];

    PlainText() {
        memset(next, -1, sizeof next);
        // States 1 to 3: 1 to 3 more bytes; 4: after E0; 5: after ED (no surrogates); 6: after F0; 7: after F4; 8, 9: after EE and EE 80,
        // because the JSON grammars do not have U+E000
        for (int byte = 0x20; byte < 0x80; byte++)
            if (byte != '"' && byte != '\\') next[0][byte] = 0;
        for (int byte = 0xC2; byte <= 0xDF; byte++) next[0][byte] = 1;
        for (int byte = 0xE1; byte <= 0xEF; byte++) next[0][byte] = 2;
        for (int byte = 0xF1; byte <= 0xF3; byte++) next[0][byte] = 3;
        next[0][0xE0] = 4;
        next[0][0xEE] = 8;
        next[8][0x80] = 9;
        next[0][0xED] = 5;
        next[0][0xF0] = 6;
        next[0][0xF4] = 7;
        for (int byte = 0x80; byte <= 0xBF; byte++) {
            for (int left = 1; left <= 3; left++) next[left][byte] = (int8_t)(left - 1);
            if (byte != 0x80) next[8][byte] = 1, next[9][byte] = 0;
            if (byte >= 0xA0) next[4][byte] = 1;
            else next[5][byte] = 1;
            if (byte >= 0x90) next[6][byte] = 2;
            else next[7][byte] = 2;
        }
    }

    int32_t count(const uint8_t *text, int32_t size) const { // of characters, -1 if a part of the text is not plain
        int32_t state = 0, characters = 0;
        for (int32_t at = 0; at < size && state >= 0; at++) characters += (state = next[state][text[at]]) == 0;
        return state == 0 ? characters : -1;
    }
};

static const PlainText plain_text;

// Groups of bytes that grammars mostly treat in the same way; all other bytes are one group.
struct ByteGroups {
    static constexpr int OTHERS = 63, WORDS[] = {1, 3, 4, 0, 2}; // WORDS: the groups of letters and digits, groups with most tokens first
    uint8_t of[256];
    ByteGroups() {
        int groups = 5;
        for (int byte = 0; byte < 256; byte++) {
            bool is_hex = (byte | 32) <= 'f';
            if (byte >= '0' && byte <= '9') of[byte] = 4;
            else if (byte >= 'a' && byte <= 'z') of[byte] = is_hex ? 0 : 1;
            else if (byte >= 'A' && byte <= 'Z') of[byte] = is_hex ? 2 : 3;
            else of[byte] = byte >= ' ' && byte < 0x7F ? (uint8_t)groups++ : OTHERS;
        }
    }
};

static const ByteGroups byte_groups;

struct Entry {
    const uint8_t *text;
    int32_t size, id;
    int32_t characters; // -1: not plain
};

static bool in_text_order(const Entry &left, const Entry &right) {
    int order = memcmp(left.text, right.text, (size_t)std::min(left.size, right.size));
    return order ? order < 0 : left.size != right.size ? left.size < right.size : left.id < right.id;
}

static Trie make_trie(const std::vector<Entry> &sorted) {
    Trie trie;
    std::vector<Trie::Node> &nodes = trie.nodes;
    Ints sizes{0}; // [nodes] number of bytes up to the node
    for (const Entry &entry : sorted) trie.tokens.push_back(entry.id);
    trie.bytes.push_back(0);
    nodes.push_back({0, 0, 0, 0, (int32_t)sorted.size(), 0});
    for (size_t number = 0; number < nodes.size(); number++) {
        int32_t size = sizes[number], at = nodes[number].first_token;
        Trie::Node node = nodes[number];
        for (int32_t token = at; token < node.end_token; token++) node.height = std::max(node.height, sorted[(size_t)token].size - size);
        while (at < node.end_token && sorted[(size_t)at].size == size) at++;
        node.below_token = at;
        node.first_child = (int32_t)nodes.size();
        nodes[number] = node;
        trie.leaf_token.push_back(at == node.end_token && at == node.first_token + 1 ? node.first_token : -1);
        while (at < node.end_token) {
            uint8_t byte = sorted[(size_t)at].text[size];
            int32_t first = at;
            while (at < node.end_token && sorted[(size_t)at].text[size] == byte) at++;
            nodes.push_back({0, 0, first, first, at, 0});
            if (!size) trie.first_of[byte] = (int32_t)nodes.size() - 1;
            trie.bytes.push_back(byte);
            sizes.push_back(size + 1);
        }
    }
    nodes.push_back({0, (int32_t)nodes.size(), 0, 0, 0, 0});
    for (size_t number = nodes.size() - 1; number-- > 0;)
        for (int32_t child = nodes[number].first_child; child < nodes[number + 1].first_child; child++)
            nodes[number].groups |= nodes[(size_t)child].groups | 1ull << byte_groups.of[trie.bytes[(size_t)child]];
    return trie;
}

// There is a tree of tokens for each part: by whether a token is plain text and by its number of quotes; plain tokens also by length. Few
// tokens are not plain, few are long.
struct Part { bool is_plain; int32_t quotes, shortest, longest; }; // quotes: in the last part, or more
constexpr int32_t ANY = 1 << 30;
constexpr Part PARTS[] = {{true, 0, 1, 8}, {true, 0, 9, 16}, {true, 0, 17, ANY}, {false, 0, 1, ANY}, {false, 1, 1, ANY},
    {false, 2, 1, ANY}};
constexpr size_t NUM_PARTS = std::size(PARTS);
constexpr int32_t MOST_BYTES = 1 << 15; // stands for an unlimited length
constexpr int32_t SHARED_TOKENS = 100; // a subtree with as many tokens is walked once for several states
constexpr int32_t MAX_COARSER_BYTES = 16; // states are compared for texts of up to this many bytes
constexpr int64_t MAX_COARSER_MOVES = 50'000'000; // moves that are compared to find equivalent states
// Steps before equivalent states are searched for, and before subtrees are shared: both take longer if few states are equivalent.
constexpr int64_t MOVES_PER_STEP = 8, STEPS_PER_MOVE = 2;
constexpr size_t MAX_BELOW = 8'000'000; // in words
constexpr size_t LARGE_PART = 24, MAX_LARGE_PARTS = 256; // size in `below_bits`; kept parts: 8 MB at 131,072 tokens

static Ints bits_of(const Ints &tokens, int32_t words) {
    Ints row((size_t)words, 0);
    for (int32_t id : tokens) row[id / 32] |= (int32_t)(1u << (id % 32));
    return row;
}

Vocabulary::Vocabulary(
    const uint8_t *bytes, const int32_t *offsets, int32_t num_tokens, const Ints &stop_ids, const Ints &hidden_ids, int32_t words
)
    : text(bytes, bytes + offsets[num_tokens]), starts(offsets, offsets + num_tokens + 1), stops(stop_ids),
        stop_words(bits_of(stop_ids, words)),
      hidden_words(bits_of(hidden_ids, words)), words(words) {
    std::vector<Entry> entries;
    for (int32_t id = 0; id < num_tokens; id++) {
        int32_t size = starts[id + 1] - starts[id];
        if (!size || hidden_words[id / 32] >> (id % 32) & 1) continue;
        longest = std::max(longest, size);
        if (size > MAX_TOKEN_BYTES) continue; // no grammar is compiled
        entries.push_back({text.data() + starts[id], size, id, plain_text.count(text.data() + starts[id], size)});
        longest_plain = std::max(longest_plain, entries.back().characters);
    }
    std::sort(entries.begin(), entries.end(), in_text_order);
    for (const Part &part : PARTS) {
        std::vector<Entry> some;
        for (const Entry &entry : entries) {
            auto quotes = std::min((int32_t)std::count(entry.text, entry.text + entry.size, '"'), PARTS[NUM_PARTS - 1].quotes);
            bool is_long = entry.size >= part.shortest && entry.size <= part.longest;
            if ((entry.characters >= 0) == part.is_plain && quotes == part.quotes && is_long) some.push_back(entry);
        }
        tries.push_back(make_trie(some));
        tries.back().is_plain = part.is_plain;
    }
    plain.assign((size_t)(longest_plain + 1) * words, 0);
    for (const Entry &entry : entries)
        for (int32_t count = entry.characters; count >= 0 && count <= longest_plain; count++)
            plain[(size_t)count * words + entry.id / 32] |= (int32_t)(1u << (entry.id % 32));
}

image_vocabulary Vocabulary::view() const {
    return {text.data(), starts.data(), plain.data(), stop_words.data(), hidden_words.data(), (int64_t)starts.size() - 1, longest_plain + 1,
        words, longest};
}

namespace {

// A row in which few words are not zero.
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

    // Removes the nonzero words. Pairs of word index and bits, in order; valid until the next call.
    Slice<int32_t> take() {
        int32_t *past = pairs.data();
        uint64_t *begin = used.data(), *end = begin + used.size();
        for (uint64_t *at = begin; at < end; at++)
            for (; *at; *at &= *at - 1) {
                size_t word = (size_t)(at - begin) * 64 + (size_t)__builtin_ctzll(*at);
                *past++ = (int32_t)word, *past++ = (int32_t)std::exchange(bits[word], 0);
            }
        return {pairs.data(), past};
    }

private:
    Ints pairs;
};

// What may follow after a token has left the part of the grammar in which it began: sets of states, numbered as they are found. The stack
// is not known, so a part that ends continues as after any symbol. A counted loop may be in its last iteration.
class Continuations {
public:
    static constexpr int32_t NONE = -1, ANY = -2; // no text may follow; the limit of work is reached, and any text may follow

    explicit Continuations(const Automaton &automaton)
        : automaton(automaton), after((size_t)automaton.finish_sets, UNKNOWN), added((size_t)automaton.states, 0) {}

    // The set after the end of a part.
    int32_t after_part(int32_t finish_set) {
        int32_t &found = after[(size_t)finish_set];
        if (found == UNKNOWN) {
            ended.push_back(finish_set);
            found = number_added();
        }
        return found;
    }

    // The set after a byte class.
    int32_t next(int32_t set, int32_t c) {
        if (set < 0) return set;
        size_t at = (size_t)set * (size_t)automaton.classes + (size_t)c;
        if (moves[at] == UNKNOWN) {
            for (int32_t state : sets.of(set)) {
                int32_t entry = automaton.next[(size_t)state * (size_t)automaton.classes + (size_t)c];
                if (entry < SPECIAL) add(entry);
                else add(automaton.moves[entry - SPECIAL].target), add(automaton.moves[entry - SPECIAL].last_target);
            }
            int32_t found = number_added(); // may move `moves`
            moves[at] = found;
        }
        return moves[at];
    }

private:
    static constexpr int32_t UNKNOWN = -3;
    static constexpr int64_t MAX_WORK = 4'000'000; // states read, and elements of `moves`: some milliseconds and 16 MB

    void add(int32_t state) {
        work++;
        if (state < 0 || added[(size_t)state] == round) return;
        added[(size_t)state] = round;
        if (int32_t pop = automaton.pop[state]; pop >= 0) ended.push_back(pop);
        else set.push_back(state);
    }

    // The number of the set of states that were added.
    int32_t number_added() {
        while (!ended.empty()) {
            const int32_t *to = &automaton.go[(size_t)ended.back() * (size_t)automaton.symbols];
            ended.pop_back();
            for (int32_t symbol = 0; symbol < automaton.symbols && work < MAX_WORK; symbol++) add(to[symbol]);
        }
        std::sort(set.begin(), set.end());
        int32_t number = work < MAX_WORK ? set.empty() ? NONE : sets.add(set).number : ANY;
        if (moves.size() < (size_t)sets.size() * (size_t)automaton.classes) {
            moves.resize((size_t)sets.size() * (size_t)automaton.classes, UNKNOWN);
            work += automaton.classes;
        }
        set.clear();
        round++;
        return number;
    }

    const Automaton &automaton;
    Interned sets;
    Ints after; // [finish sets] set
    Ints moves; // [sets, classes] set
    Ints set, ended, added; // being built: its states; finish sets of parts that end; [states] the last `round` in which a state was added
    int32_t round = 1;
    int64_t work = 0;
};

class Masks {
public:
    Masks(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits)
        : automaton(automaton), vocabulary(vocabulary), limits(limits),
          narrow(std::max((size_t)automaton.states, automaton.moves.size() + 1) <= 1 << 15), bytes_of(bytes_by_class(automaton)),
          quote(bytes_of[automaton.class_of['"']].size() == 1 ? automaton.class_of['"'] : -1), rows(automaton.classes),
          continuations(automaton), row((size_t)vocabulary.words), large((size_t)vocabulary.words),
          ordered(vocabulary.starts.size() / 32 + 1), top_at((size_t)vocabulary.longest + 1), pushed((size_t)vocabulary.longest + 1) {
        find_walk_states();
    }

    Image image() {
        find_plain_rows();
        find_levels();
        row_of.assign(automaton.states, -1);
        crossing.resize(automaton.symbols ? automaton.states : 0);
        for (int32_t state = 0; state < automaton.states; state++) {
            if (automaton.pop[state] >= 0) continue; // a text is never in it
            int64_t moves = (int64_t)levels[0].first.size() * automaton.classes;
            if (levels[0].coarser.empty() && steps > moves / MOVES_PER_STEP) find_coarser(levels[0]);
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
    static std::vector<std::vector<uint8_t>> bytes_by_class(const Automaton &automaton) {
        std::vector<std::vector<uint8_t>> bytes((size_t)automaton.classes);
        for (int byte = 0; byte < 256; byte++) bytes[automaton.class_of[(size_t)byte]].push_back((uint8_t)byte);
        return bytes;
    }

    // Classes of states that read the same tokens with up to as many quotes as the number of the level, and pop and push the same symbols.
    struct Level {
        Ints class_of; // [states]
        Ints first; // [classes] the first state
        std::vector<Ints> coarser; // [bytes][classes] larger classes, for tokens of at most as many bytes; see `find_coarser`
        int32_t coarser_classes = 0; // number of classes in `coarser`
        bool is_final = false; // whether the last of `coarser` holds for texts of any length
    };

    struct WalkState { // the data of a state that a walk reads
        uint64_t groups = 0; // every text of these byte groups of at most `closed` bytes is legal and remains in the part of the grammar
        int32_t closed = 0;
        int32_t pop = -1;
        int32_t surely = 0; // every plain text of at most this number of bytes is legal
    };

    struct Range { size_t begin, end; };
    struct Below { // tokens below a node, or of a whole tree
        int32_t bits; // number in below_bits
        Range crossed; // range of below_crossed
        int32_t followed; // number of bytes on which the tokens depend
    };

    int32_t push_of(int32_t entry) const { return entry >= SPECIAL ? automaton.moves[entry - SPECIAL].push : -1; }
    // The state after an entry, or DEAD; for a counted loop, the state while iterations are left.
    int32_t target_of(int32_t entry) const { return entry >= SPECIAL ? automaton.moves[entry - SPECIAL].target : entry; }
    int32_t entry_of(int32_t state, int32_t c) const { return automaton.next[(size_t)state * automaton.classes + c]; }

    // Sum over the classes that a state reads, given the prefix sums over classes.
    int32_t sum_of(int32_t state, const Ints &before) const {
        int32_t sum = 0;
        for (const Span &span : automaton.spans_of(state)) sum += before[(size_t)span.end] - before[(size_t)span.low];
        return sum;
    }

    // For each state the number n such that its plain tokens are exactly those of at most n characters; 0 if there is no such number.
    void find_plain_rows() {
        int32_t longest = vocabulary.longest_plain, states = automaton.states;
        plain_row.assign(states, 0);
        if (!longest) return;
        std::vector<std::pair<uint8_t, int8_t>> moves[PlainText::STATES];
        for (int state = 0; state < PlainText::STATES; state++) {
            for (int byte = 0; byte < 256; byte++)
                if (plain_text.next[state][byte] >= 0) moves[state].push_back({automaton.class_of[byte], plain_text.next[state][byte]});
            sort_unique(moves[state]);
        }
        std::vector<Ints> after(states); // states after one character
        std::vector<char> some(states, 0), all(states, 1); // whether any plain character is legal, whether every one is
        std::vector<std::pair<int32_t, int8_t>> work;
        constexpr int32_t PLAIN = 1 << 16;
        Ints before((size_t)automaton.classes + 1, 0); // prefix sums over classes: 1 if a byte begins a plain character, PLAIN if it is one
        for (auto [c, to_inside] : moves[0]) before[(size_t)c + 1] += to_inside == 0 ? PLAIN : 1;
        std::partial_sum(before.begin(), before.end(), before.begin());
        for (int32_t state = 0; state < states; state++) {
            if (automaton.pop[state] >= 0) continue;
            int32_t read = sum_of(state, before);
            if (!read || (read / PLAIN > 0 && read / PLAIN < before.back() / PLAIN)) { // its successors do not matter
                some[state] = read > 0, all[state] = 0;
                continue;
            }
            work.assign(1, {state, 0});
            for (size_t at = 0; at < work.size(); at++) {
                auto [from, inside] = work[at];
                for (auto [c, to_inside] : moves[inside]) {
                    int32_t entry = entry_of(from, c), to = target_of(entry);
                    if (entry < 0 || push_of(entry) >= 0 || automaton.pop[to] >= 0) {
                        all[state] = 0;
                        some[state] |= entry >= 0;
                    } else if (to_inside == 0) {
                        some[state] = 1;
                        if (after[state].empty() || after[state].back() != to) after[state].push_back(to);
                    } else if (std::find(work.begin(), work.end(), std::make_pair(to, to_inside)) == work.end()) {
                        work.push_back({to, to_inside});
                    }
                }
            }
            sort_unique(after[state]);
        }
        // surely: all texts of this number of plain characters are legal; maybe: some are. States that are not in `open` have final values.
        Ints surely(states, 0), maybe(states, 0), open;
        for (int32_t state = 0; state < states; state++) {
            if (some[state] && all[state] && after[state] == Ints{state}) surely[state] = maybe[state] = longest;
            else if (some[state] && all[state]) open.push_back(state);
            else if (some[state]) maybe[state] = longest + 1;
        }
        bool any = true;
        for (int32_t round = 0; any && round < longest; round++) {
            any = false;
            for (int32_t state : open) {
                int32_t low = longest, high = 0;
                for (int32_t to : after[state]) low = std::min(low, surely[to] + 1), high = std::max(high, maybe[to] + 1);
                high = std::min(longest + 1, high);
                any |= low != surely[state] || high != maybe[state];
                surely[state] = low;
                maybe[state] = high;
            }
        }
        for (int32_t state = 0; state < states; state++) {
            walk_states[(size_t)state].surely = surely[state];
            if (surely[state] == maybe[state] || (surely[state] == longest && maybe[state] >= longest)) plain_row[state] = surely[state];
        }
    }

    void find_levels() {
        leave_out_quotes();
        Level every; // each state is its own class
        every.class_of.resize((size_t)automaton.states);
        std::iota(every.class_of.begin(), every.class_of.end(), 0);
        every.first = every.class_of;
        if (quote >= 0) {
            for (Ints &classes : equivalent_states(unquoted, [this](const Ints &first) { return kinds_after_quotes(first); }))
                levels.push_back(level_with(std::move(classes)));
        }
        levels.push_back(std::move(every));
        for (size_t part = 0; part < NUM_PARTS; part++) {
            level_of[part] = std::min((size_t)PARTS[part].quotes, levels.size() - 1);
            below_of[part].assign(levels[level_of[part]].first.size(), -1);
            Ints &before = first_before[part];
            before.assign((size_t)automaton.classes + 1, 0);
            for (size_t byte = 0; byte < 256; byte++) before[automaton.class_of[byte] + 1] += vocabulary.tries[part].first_of[byte] > 0;
            std::partial_sum(before.begin(), before.end(), before.begin());
        }
    }

    // Finds `unquoted`: the spans without the quote and without counters; a move that pushes has the symbol in place of a counter.
    void leave_out_quotes() {
        unquoted.states = automaton.states;
        unquoted.classes = automaton.classes;
        unquoted.accepts.assign((size_t)automaton.states, 0);
        unquoted.pop = automaton.pop;
        Interned moves;
        for (int32_t state = 0; state < automaton.states; state++) {
            for (const Span &span : automaton.spans_of(state)) {
                int32_t entry = target_of(span.entry);
                if (entry < 0) continue;
                if (push_of(span.entry) >= 0) {
                    Move move;
                    move.target = entry, move.counter = push_of(span.entry);
                    auto [number, is_new] = moves.add(move.ints(), Move::INTS);
                    if (is_new) unquoted.moves.push_back(move);
                    entry = SPECIAL + number;
                }
                if (span.low < quote) unquoted.add_span({span.low, std::min(span.end, quote), entry});
                if (span.end > quote + 1) unquoted.add_span({std::max(span.low, quote + 1), span.end, entry});
            }
            unquoted.end_state();
        }
    }

    // [states] The class of the first level, that of the state after a quote, in which a text of the second level continues, and what the
    // quote pushes, as one number.
    Ints kinds_after_quotes(const Ints &classes) const {
        Interned kinds;
        Ints found;
        for (int32_t state = 0; state < automaton.states; state++) {
            int32_t quoted = entry_of(state, quote), to = target_of(quoted);
            const int32_t kind[] = {classes[(size_t)state], to < 0 ? DEAD : classes[(size_t)to], to < 0 ? DEAD : push_of(quoted)};
            found.push_back(kinds.add(kind, std::size(kind)).number);
        }
        return found;
    }

    static Level level_with(Ints classes) {
        Level level;
        level.class_of = std::move(classes);
        for (int32_t state = (int32_t)level.class_of.size(); state-- > 0;) {
            size_t class_id = (size_t)level.class_of[(size_t)state];
            if (level.first.size() <= class_id) level.first.resize(class_id + 1);
            level.first[class_id] = state;
        }
        return level;
    }

    // Finds `coarser`: groups of classes of a level from which the same texts of at most n bytes can be read, with the same symbols popped
    // and pushed, for n from 0 on. Ends when no group changes, or at a limit of work. Each round divides the groups of several classes.
    void find_coarser(Level &level) {
        int32_t size = (int32_t)level.first.size();
        std::vector<Ints> open, still; // groups of several classes
        level.coarser.assign(1, Ints((size_t)size));
        Interned kinds;
        for (int32_t class_id = 0; class_id < size; class_id++) {
            level.coarser[0][(size_t)class_id] = kinds.add(&automaton.pop[level.first[(size_t)class_id]], 1).number;
            open.resize((size_t)kinds.size());
            open[(size_t)level.coarser[0][(size_t)class_id]].push_back(class_id);
        }
        int32_t count = kinds.size();
        open.erase(std::remove_if(open.begin(), open.end(), [](const Ints &states) { return states.size() < 2; }), open.end());
        std::vector<std::pair<uint64_t, int32_t>> sorted; // the members of one group, by hash
        for (int64_t work = 0; level.coarser.size() <= MAX_COARSER_BYTES && !level.is_final && work <= MAX_COARSER_MOVES;) {
            const bool is_first = level.coarser.size() == 1;
            const Ints &last = level.coarser.back(), &before = is_first ? last : level.coarser[level.coarser.size() - 2];
            auto move_at = [&](int32_t entry) { return entry < SPECIAL ? nullptr : &unquoted.moves[(size_t)(entry - SPECIAL)]; };
            auto target_class = [&](int32_t entry) { return level.class_of[(size_t)(entry < SPECIAL ? entry : move_at(entry)->target)]; };
            auto class_after = [&](int32_t entry) {
                return last[(size_t)target_class(entry)] | (entry < SPECIAL ? 0 : (int64_t)move_at(entry)->counter + 1) << 32;
            };
            Ints found = last;
            level.is_final = true;
            still.clear();
            auto is_same = [&](int32_t entry, int32_t other) { return class_after(entry) == class_after(other); };
            auto is_changed = [&](const Span &span) {
                auto class_id = (size_t)target_class(span.entry);
                return last[class_id] != before[class_id];
            };
            auto spans_of = [&](int32_t class_id) { return unquoted.spans_of(level.first[(size_t)class_id]); };
            auto leads_to_same = [&](int32_t class_id) { // as in the previous round
                return std::none_of(spans_of(class_id).begin(), spans_of(class_id).end(), is_changed);
            };
            for (Ints &members : open) {
                if (!is_first && std::all_of(members.begin(), members.end(), leads_to_same)) {
                    still.push_back(std::move(members));
                    continue;
                }
                sorted.clear();
                for (int32_t class_id : members) {
                    work += spans_of(class_id).end() - spans_of(class_id).begin();
                    sorted.push_back({rows.hash(spans_of(class_id), class_after), class_id});
                }
                std::sort(sorted.begin(), sorted.end());
                for (size_t begin = 0, end; begin < sorted.size(); begin = end) { // the first part keeps the number
                    int32_t number = begin ? count++ : last[(size_t)members[0]];
                    auto is_like_first = [&](size_t at) {
                        auto [hash, class_id] = sorted[at];
                        return hash == sorted[begin].first && rows.is_equal(spans_of(class_id), spans_of(sorted[begin].second), is_same);
                    };
                    for (end = begin + 1; end < sorted.size() && is_like_first(end);) end++;
                    level.is_final &= end - begin == sorted.size();
                    const bool is_open = end - begin > 1;
                    if (is_open) still.emplace_back();
                    for (size_t at = begin; at < end; at++) {
                        found[(size_t)sorted[at].second] = number;
                        if (is_open) still.back().push_back(sorted[at].second);
                    }
                }
            }
            open.swap(still);
            level.coarser.push_back(std::move(found));
        }
        level.coarser_classes = count;
    }

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
        if (!sum_of(state, first_before[part])) return found = none >= 0 ? none : none = keep_below([] {});
        found = keep_below([&] {
            top_at[0] = 0;
            steps += trie.nodes[Trie::ROOT + 1].first_child - 1; // the number of children of the root
            for (const Span &span : automaton.spans_of(state)) // most states read few bytes
                for (int32_t c = span.low; c < span.end; c++)
                    for (uint8_t byte : bytes_of[(size_t)c])
                        if (trie.first_of[byte] && span.entry >= 0) visit(trie, trie.first_of[byte], 1, span.entry);
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
            at = known.emplace(key, keep_below([&] { walk_children(trie, node, size, state); })).first;
            followed = before;
        }
        const Below &found = below[(size_t)at->second];
        followed = std::max(followed, found.followed);
        ordered.set(below_bits.of(found.bits));
        append_crossed(found);
        return true;
    }

    // Stores the tokens that `walk` finds, without those found so far. Returns their number in `below`.
    template <class Walk> int32_t keep_below(const Walk &walk) {
        if (level == spares.size()) spares.emplace_back(ordered.bits.size());
        SparseRow &spare = spares[level++];
        std::swap(ordered, spare);
        Ints found, *outer = std::exchange(crossed, &found);
        walk();
        if (steps > limits.steps) exceeded("steps", limits.steps);
        crossed = outer;
        Slice<int32_t> pairs = ordered.take();
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
            for (int32_t value : large.take()) words.push_back(value);
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

    void find_walk_states() {
        walk_states.assign((size_t)automaton.states, {});
        for (size_t state = 0; state < walk_states.size(); state++) walk_states[state].pop = automaton.pop[state];
        std::array<Ints, ByteGroups::OTHERS> classes; // [groups] the byte classes of each group
        for (int byte = 0; byte < 256; byte++)
            if (int group = byte_groups.of[byte]; group < ByteGroups::OTHERS) classes[(size_t)group].push_back(automaton.class_of[byte]);
        for (Ints &some : classes) sort_unique(some);
        auto target_of_group = [&](int32_t state, size_t group) { // DEAD: not the same target for all bytes
            int32_t found = DEAD;
            for (int32_t c : classes[group]) {
                int32_t entry = entry_of(state, c), to = entry < 0 ? DEAD : target_of(entry);
                if (to < 0 || automaton.pop[to] >= 0 || (c != classes[group][0] && to != found) || push_of(entry) >= 0) return DEAD;
                found = to;
            }
            return found;
        };
        Ints next((size_t)automaton.states, DEAD), path; // next: the target of most letters or digits
        for (int32_t state = 0; state < automaton.states; state++) {
            int32_t &to = next[(size_t)state];
            for (int word : ByteGroups::WORDS)
                if (to < 0) to = target_of_group(state, (size_t)word);
            for (size_t group = 0; group < classes.size() && to >= 0; group++)
                if (!classes[group].empty() && target_of_group(state, group) == to) walk_states[(size_t)state].groups |= 1ull << group;
        }
        for (int32_t start = 0; start < automaton.states; start++) {
            int32_t state = start;
            for (; next[(size_t)state] >= 0 && !walk_states[(size_t)state].closed; state = next[(size_t)state]) {
                walk_states[(size_t)state].closed = next[(size_t)state] == state ? MOST_BYTES - 1 : 1;
                path.push_back(state);
            }
            for (; !path.empty(); path.pop_back()) {
                WalkState &from = walk_states[(size_t)path.back()];
                const WalkState &to = walk_states[(size_t)next[(size_t)path.back()]];
                if (&from == &to || !(from.groups & to.groups)) continue;
                from.groups &= to.groups;
                from.closed = std::min(MOST_BYTES - 1, to.closed + 1);
            }
        }
    }

    // Find the tokens below a node at `size` bytes that may continue a text in `state`: those that are legal, and those whose legality
    // depends on the stack.
    void walk_children(const Trie &trie, int32_t node, int32_t size, int32_t state) {
        int32_t begin = trie.nodes[(size_t)node].first_child, end = trie.nodes[(size_t)node + 1].first_child;
        followed = std::max(followed, size + 1);
        const int32_t *next = automaton.next.data() + (size_t)state * (size_t)automaton.classes;
        steps += end - begin;
        for (int32_t child = begin; child < end; child++) {
            int32_t entry = next[automaton.class_of[trie.bytes[(size_t)child]]];
            if (entry < 0) continue;
            bool is_plain = entry < SPECIAL && (!automaton.symbols || walk_states[(size_t)entry].pop < 0);
            if (int32_t leaf = trie.leaf_token[(size_t)child]; leaf >= 0 && is_plain) ordered.add((uint32_t)leaf);
            else visit(trie, child, size + 1, entry);
        }
    }

    // The tokens at a node and below it; `entry` leads to the node. `size`: number of bytes up to the node.
    void visit(const Trie &trie, int32_t number, int32_t size, int32_t entry) {
        const Trie::Node &node = trie.nodes[(size_t)number];
        int32_t to = target_of(entry), top = 0;
        bool below = false; // whether the move leaves a part that began before the token
        if (automaton.symbols) {
            top = top_at[(size_t)size - 1];
            if (int32_t push = push_of(entry); push >= 0) {
                pushed[(size_t)size] = {push, top, (top ? pushed[(size_t)top].size : 0) + 1};
                top = size;
                pushes = std::max(pushes, pushed[(size_t)top].size);
            }
            for (int32_t pop; to >= 0 && (pop = walk_states[(size_t)to].pop) >= 0 && !(below = !top); top = pushed[(size_t)top].below)
                to = automaton.go[(size_t)pop * (size_t)automaton.symbols + (size_t)pushed[(size_t)top].symbol];
            top_at[(size_t)size] = top;
        }
        if (to < 0) return;
        for (int32_t at = node.first_token; at < node.below_token; at++) ordered.add((uint32_t)at);
        if (node.below_token == node.end_token) return;
        if (below) return add_crossing(trie, number, continuations.after_part(walk_states[(size_t)to].pop));
        const WalkState &step = walk_states[(size_t)to];
        auto is_inside = [&] { return (trie.bytes[(size_t)node.first_child] & 0xC0) == 0x80; }; // a character: `surely` begins after one
        bool is_closed = node.height <= step.closed && !(node.groups & ~step.groups);
        if (is_closed || (trie.is_plain && node.height <= step.surely && !is_inside())) {
            followed = std::max(followed, size + node.height);
            return set_range(node.below_token, node.end_token);
        }
        bool is_shared = shares_parts && !top && node.end_token - node.below_token >= SHARED_TOKENS;
        if (is_shared && add_below(trie, number, size, to)) return;
        walk_children(trie, number, size, to);
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
        Slice<int32_t> pairs = row.take();
        packed.resize(pairs.size());
        size_t kept = 0;
        for (const int32_t *at = pairs.first; at < pairs.last; at += 2) {
            int32_t before = plain ? plain[at[0]] : 0, bits = at[1] | before;
            if (!any_text) any_text = (bits & ~vocabulary.stop_words[(size_t)at[0]]) != 0;
            if (bits != before) packed[kept++] = at[0], packed[kept++] = bits; // not words that equal the base
        }
        packed.resize(kept);
        status_of.push_back(any_text ? 1 : packed.empty() ? 4 : 2); // MaskStatus OK, DEAD_END, COMPLETE
        change_start.push_back((int32_t)change_word.size());
        size_t words = (size_t)vocabulary.words, begin = dense.size();
        bool is_dense = packed.size() * 2 > words; // a change takes two words
        base_of.push_back(is_dense ? (int32_t)(begin / words) : base);
        if (is_dense) dense.resize(begin + words, 0);
        if (is_dense && plain) std::copy_n(plain, words, &dense[begin]);
        for (size_t at = 0; at < packed.size(); at += 2) {
            if (is_dense) dense[begin + (size_t)packed[at]] = packed[at + 1];
            else change_word.push_back(packed[at]), change_value.push_back(packed[at + 1]);
        }
        check_size(4 * (int64_t)(dense.size() + 2 * change_word.size() + automaton.next.size() / (narrow ? 2 : 1)));
    }

    // An upper bound of the symbols that a legal token has on the stack at a time. After a token has left the part in which it began, its
    // moves are not known, so every byte for which any move pushes is counted. No memory depends on it; above the limit of a lane,
    // another one follows the grammar. Of SmolLM2's vocabulary it is 2 for any JSON and 3 for JSON with regular expressions.
    int32_t most_pushes() const {
        std::vector<char> may_push(automaton.classes, 0), seen(vocabulary.starts.size(), 0);
        for (const Span &span : automaton.spans)
            if (push_of(span.entry) >= 0) std::fill_n(&may_push[span.low], span.end - span.low, 1);
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

    Ints packed_entries() const { // IMAGE_NEXT
        const Ints &next = automaton.next;
        auto renumbered = [](int32_t entry) { return (uint32_t)(entry >= SPECIAL ? SPECIAL - 2 - entry : entry); };
        Ints entries(narrow ? (next.size() + 1) / 2 : next.size());
        if (!narrow) std::transform(next.begin(), next.end(), entries.begin(), renumbered);
        for (size_t at = 0; narrow && at < next.size() / 2; at++)
            entries[at] = (int32_t)((renumbered(next[2 * at]) & 0xFFFF) | renumbered(next[2 * at + 1]) << 16);
        if (narrow && next.size() % 2) entries.back() = (int32_t)(renumbered(next.back()) & 0xFFFF);
        return entries;
    }

    Image assembled() {
        change_start.push_back((int32_t)change_word.size());
        Ints class_of(automaton.class_of.begin(), automaton.class_of.end()), next = packed_entries(), leave = automaton.pop;
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
            {IMAGE_NEXT, &next}, {IMAGE_MOVES, &moves}, {IMAGE_LEAVE, &leave}, {IMAGE_RETURN, &automaton.go},
            {IMAGE_CHANGE_WORD, &change_word}, {IMAGE_CHANGE_VALUE, &change_value}, {IMAGE_CROSS_START, &cross_start},
            {IMAGE_CROSS, &cross},
        };
        auto size = (int64_t)header.size();
        for (auto &[field, values] : tables) {
            header[(size_t)field] = (int32_t)size;
            check_size(4 * (size += (int64_t)values->size()));
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
        for (auto &[field, values] : tables) std::copy(values->begin(), values->end(), image.get() + header[(size_t)field]);
        return image;
    }

    const Automaton &automaton;
    const Vocabulary &vocabulary;
    const Limits &limits;
    const bool narrow; // whether 16 bits hold each entry of IMAGE_NEXT
    std::vector<std::vector<uint8_t>> bytes_of; // [classes]
    Ints plain_row, row_of; // [states]
    std::vector<Ints> crossing; // [states]
    std::vector<WalkState> walk_states; // [states]
    const int32_t quote; // the byte class of the quote, or -1 if the class has other bytes
    Automaton unquoted; // see `leave_out_quotes`
    const Rows rows; // compares its states
    std::vector<Level> levels;
    std::array<size_t, NUM_PARTS> level_of{};
    std::array<Ints, NUM_PARTS> first_before; // [classes + 1] prefix sums over classes: bytes that begin a token
    std::array<Ints, NUM_PARTS> below_of; // [classes of the level] number in `below`, or -1
    std::array<std::vector<Ints>, NUM_PARTS> parts_like; // [bytes][class] number in `below` of a part that depends on so many bytes, or -1
    Interned parts_of_rows; // the parts, whether the text may end, and the base
    int32_t followed = 0; // number of bytes of a token on which the part that is being walked depends
    bool shares_parts = false; // whether tokens below a node are found for several states at once
    std::vector<Below> below;
    int32_t none = -1; // number in `below` of no tokens
    std::array<std::unordered_map<uint64_t, int32_t>, NUM_PARTS> below_node; // by node and class
    Interned below_bits; // pairs of word index and bits of `ordered`
    Ints packed; // the changes of the row that is being added
    Continuations continuations;
    Ints below_crossed, *crossed = nullptr; // tokens whose legality depends on the stack; of the state or the part that is being walked
    std::deque<SparseRow> spares; // one for each nested call of `keep_below`
    size_t level = 0; // number of nested calls of `keep_below`
    SparseRow row, large; // being built: a row, and a large part of one
    std::unordered_map<uint64_t, Ints> large_parts; // by part and number in `below_bits`: pairs of word index and bits
    SparseRow ordered; // the tokens of a tree, in its order: those below a node are adjacent
    struct Pushed { int32_t symbol, below, size; }; // a symbol, the index of the symbol below it, and the stack size
    Ints top_at; // [bytes] index in `pushed` of the top of the stack after so many bytes; 0: the stack is empty
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
