// See masks.h. The row of a state is found by walking the tree of tokens from it. Two things make that cheap: most tokens are plain text,
// whose rows inside strings are known beforehand by their number of characters; and the other tokens have few different suffixes from their
// first character that is not plain.

#include "masks.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <unordered_map>

namespace stepgraph {

PlainText::PlainText() {
    memset(next, -1, sizeof next);
    // 1 to 3: that many bytes to come; 4 after E0, 5 after ED (no surrogates), 6 after F0, 7 after F4; 8 and 9 after EE and EE 80, because
    // the JSON grammars do not have U+E000
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

int PlainText::plain_from(const uint8_t *text, int size) const {
    int from = size;
    for (int start = size - 1; start >= 0; start--) { // the last start of a character, and so on towards the front
        int state = 0, at = start;
        while (at < from && state >= 0) state = next[state][text[at++]];
        if (state == 0) from = start;
        else if (from - start >= 4) break;
    }
    return from;
}

int PlainText::plain_until(const uint8_t *text, int size) const {
    int until = 0, state = 0;
    for (int at = 0; at < size && (state = next[state][text[at]]) >= 0; at++)
        if (state == 0) until = at + 1;
    return until;
}

static const PlainText plain_text;

static int32_t count_characters(const uint8_t *text, int32_t size) {
    return (int32_t)std::count_if(text, text + size, [](uint8_t byte) { return (byte & 0xC0) != 0x80; });
}

struct Entry {
    const uint8_t *text;
    int32_t size, id;
};

static bool in_text_order(const Entry &left, const Entry &right) {
    int order = memcmp(left.text, right.text, (size_t)std::min(left.size, right.size));
    return order ? order < 0 : left.size != right.size ? left.size < right.size : left.id < right.id;
}

static Trie make_trie(const std::vector<Entry> &sorted) {
    Trie trie;
    Ints path; // nodes from the root to the previous token
    const uint8_t *previous = nullptr;
    for (const auto &[text, size, id] : sorted) {
        int32_t shared = 0;
        while (shared < (int32_t)path.size() && shared < size && previous[shared] == text[shared]) shared++;
        for (; (int32_t)path.size() > shared; path.pop_back()) trie.skip[path.back()] = (int32_t)trie.byte.size();
        for (int32_t at = shared; at < size; at++) {
            path.push_back((int32_t)trie.byte.size());
            trie.byte.push_back(text[at]);
            trie.depth.push_back(at);
            trie.skip.push_back(-1);
            trie.reach.push_back(0);
            trie.plain_characters.push_back(0);
            trie.starts_plain.push_back(0);
            trie.first_token.push_back((int32_t)trie.tokens.size());
        }
        int32_t from = plain_text.plain_from(text, size);
        for (int32_t at = 0; at < size; at++) {
            trie.reach[path[at]] = std::max(trie.reach[path[at]], from);
            if (at + 1 < from) continue;
            if (at + 1 == from && from < size) trie.starts_plain[path[at]] = 1;
            int32_t &most = trie.plain_characters[path[at]];
            most = std::max(most, count_characters(text + at + 1, size - at - 1));
        }
        trie.tokens.push_back(id);
        trie.plain_from.push_back(from);
        previous = text;
    }
    for (; !path.empty(); path.pop_back()) trie.skip[path.back()] = (int32_t)trie.byte.size();
    trie.first_token.push_back((int32_t)trie.tokens.size());
    return trie;
}

constexpr int32_t FEW_TOKENS = 16; // below a node: they are set one by one

static void add_bits(Trie &trie, int32_t words) {
    std::vector<uint32_t> row((size_t)words, 0);
    Ints touched;
    for (size_t node = 0; node < trie.byte.size(); node++) {
        trie.bits_start.push_back((int32_t)trie.bit_words.size());
        int32_t begin = trie.first_token[node], end = trie.first_token[(size_t)trie.skip[node]];
        if (end - begin < FEW_TOKENS) continue;
        for (int32_t at = begin; at < end; at++) {
            if (trie.plain_from[at] > trie.depth[node] + 1) continue;
            int32_t word = trie.tokens[at] / 32;
            if (!row[word]) touched.push_back(word);
            row[word] |= 1u << (trie.tokens[at] % 32);
        }
        for (int32_t word : touched) {
            trie.bit_words.push_back(word);
            trie.bits.push_back(row[word]);
            row[word] = 0;
        }
        touched.clear();
    }
    trie.bits_start.push_back((int32_t)trie.bit_words.size());
}

Vocabulary::Vocabulary(const uint8_t *bytes, const int32_t *offsets, int32_t num_tokens, const int32_t *stop_ids, int32_t num_stops, int32_t words)
    : text(bytes, bytes + offsets[num_tokens]), starts(offsets, offsets + num_tokens + 1), stops(stop_ids, stop_ids + num_stops),
      stop_words(words, 0), words(words) {
    std::vector<Entry> entries;
    for (int32_t id = 0; id < num_tokens; id++) {
        int32_t size = starts[id + 1] - starts[id];
        if (size) entries.push_back({text.data() + starts[id], size, id});
        longest = std::max(longest, size);
    }
    std::sort(entries.begin(), entries.end(), in_text_order);
    trie = make_trie(entries);
    add_bits(trie, words);
    Ints characters(num_tokens, -1); // of plain tokens
    std::vector<Entry> others; // tokens that are not plain, without the characters before the first that is not
    for (const Entry &entry : entries) {
        int32_t until = plain_text.plain_until(entry.text, entry.size), count = count_characters(entry.text, until);
        if (until < entry.size) {
            others.push_back({entry.text + until, entry.size - until, entry.id});
            by_characters.resize(std::max(by_characters.size(), (size_t)count + 1));
            continue;
        }
        characters[entry.id] = count;
        longest_plain = std::max(longest_plain, count);
    }
    plain.assign((size_t)(longest_plain + 1) * words, 0);
    for (const Entry &entry : entries)
        for (int32_t count = characters[entry.id]; count >= 0 && count <= longest_plain; count++)
            plain[(size_t)count * words + entry.id / 32] |= (int32_t)(1u << (entry.id % 32));
    std::sort(others.begin(), others.end(), in_text_order);
    std::vector<Entry> distinct;
    for (const Entry &entry : others) {
        if (distinct.empty() || distinct.back().size != entry.size || memcmp(distinct.back().text, entry.text, (size_t)entry.size)) {
            distinct.push_back({entry.text, entry.size, (int32_t)distinct.size()});
            suffix_start.push_back((int32_t)suffix_tokens.size());
        }
        suffix_tokens.push_back(entry.id);
        const uint8_t *start = text.data() + starts[entry.id];
        by_characters[count_characters(start, (int32_t)(entry.text - start))].push_back({(int32_t)distinct.size() - 1, entry.id});
    }
    suffix_start.push_back((int32_t)suffix_tokens.size());
    suffixes = make_trie(distinct);
    for (int32_t id : stops) stop_words[id / 32] |= (int32_t)(1u << (id % 32));
}

image_vocabulary Vocabulary::view() const {
    return {text.data(), starts.data(), plain.data(), stop_words.data(), (int64_t)starts.size() - 1, longest_plain + 1, words, longest};
}

namespace {

uint64_t mixed(uint64_t value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}

class Masks {
public:
    Masks(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits)
        : automaton(automaton), vocabulary(vocabulary), limits(limits), row((size_t)vocabulary.words, 0),
          changed((size_t)vocabulary.words, 0) {}

    std::vector<int32_t> image() {
        find_plain_rows();
        row_of.assign(automaton.states, -1);
        crossing.resize(automaton.symbols ? automaton.states : 0);
        for (int32_t state = 0; state < automaton.states; state++) {
            if (automaton.pop[state] >= 0) continue; // a text is never in it
            int32_t base = plain_row[state] > 0 ? -2 - plain_row[state] : -1;
            if (base == -1 || !add_suffixes(state)) walk_tokens(state, base == -1 ? -1 : 0);
            if (automaton.accepts[state])
                for (int32_t stop : vocabulary.stops) set(stop);
            row_of[state] = take_row(base);
        }
        return assembled();
    }

private:
    const Move *special(int32_t entry) const { return entry >= SPECIAL ? &automaton.moves[entry - SPECIAL] : nullptr; }
    // The state of a move inside a loop that has many iterations left.
    int32_t target_of(int32_t entry) const { return entry >= SPECIAL ? automaton.moves[entry - SPECIAL].target : entry; }
    int32_t entry_of(int32_t state, int32_t c) const { return automaton.next[(size_t)state * automaton.classes + c]; }

    void set(int32_t token) {
        set_bits(token / 32, 1u << (token % 32));
    }

    // For each state the number n such that its plain tokens are exactly those of at most n characters; 0 if there is no such number.
    void find_plain_rows() {
        int32_t longest = vocabulary.longest_plain, states = automaton.states;
        plain_row.assign(states, 0);
        surely.assign(states, 0);
        after_plain.assign(states, -1);
        if (!longest) return;
        std::vector<std::pair<uint8_t, int8_t>> moves[PlainText::STATES];
        for (int state = 0; state < PlainText::STATES; state++) {
            for (int byte = 0; byte < 256; byte++)
                if (plain_text.next[state][byte] >= 0) moves[state].push_back({automaton.class_of[byte], plain_text.next[state][byte]});
            std::sort(moves[state].begin(), moves[state].end());
            moves[state].erase(std::unique(moves[state].begin(), moves[state].end()), moves[state].end());
        }
        std::vector<Ints> after(states); // states after one character
        std::vector<char> some(states, 0), all(states, 1); // whether any, whether every plain character is legal
        std::vector<std::pair<int32_t, int8_t>> work;
        for (int32_t state = 0; state < states; state++) {
            if (automaton.pop[state] >= 0) continue;
            work.assign(1, {state, 0});
            for (size_t at = 0; at < work.size() && !(some[state] && !all[state]); at++) {
                auto [from, inside] = work[at];
                for (auto [c, to_inside] : moves[inside]) {
                    int32_t entry = entry_of(from, c), to = target_of(entry);
                    const Move *move = special(entry);
                    if (entry < 0 || (move && move->push >= 0) || automaton.pop[to] >= 0) {
                        all[state] = 0;
                        some[state] |= entry >= 0;
                    } else if (to_inside == 0) {
                        some[state] = 1;
                        after[state].push_back(to);
                    } else if (std::find(work.begin(), work.end(), std::make_pair(to, to_inside)) == work.end()) {
                        work.push_back({to, to_inside});
                    }
                }
            }
            std::sort(after[state].begin(), after[state].end());
            after[state].erase(std::unique(after[state].begin(), after[state].end()), after[state].end());
        }
        for (int32_t state = 0; state < states; state++)
            if (all[state] && some[state] && after[state].size() == 1) after_plain[state] = after[state][0];
        // surely: texts of so many plain characters are all legal; maybe: some text of so many is.
        Ints maybe(states, 0), next_surely(states), next_maybe(states);
        for (int32_t round = 0; round < longest; round++) {
            bool any = false;
            for (int32_t state = 0; state < states; state++) {
                int32_t low = 0, high = 0;
                if (some[state] && !all[state]) high = longest + 1;
                if (some[state] && all[state]) {
                    low = longest;
                    for (int32_t to : after[state]) low = std::min(low, surely[to]), high = std::max(high, maybe[to]);
                    low = std::min(longest, low + 1);
                    high = std::min(longest + 1, high + 1);
                }
                any |= low != surely[state] || high != maybe[state];
                next_surely[state] = low;
                next_maybe[state] = high;
            }
            surely.swap(next_surely);
            maybe.swap(next_maybe);
            if (!any) break;
        }
        for (int32_t state = 0; state < states; state++)
            if (surely[state] == maybe[state] || (surely[state] == longest && maybe[state] >= longest)) plain_row[state] = surely[state];
    }

    void set_bits(int32_t word, uint32_t bits) {
        if (!changed[word]) changed[word] = 1, touched.push_back(word);
        row[word] |= bits;
    }

    // Set the tokens below a node whose text after it is plain.
    void set_plain(int32_t node) {
        const Trie &trie = vocabulary.trie;
        int32_t begin = trie.bits_start[node], end = trie.bits_start[node + 1];
        for (int32_t at = begin; at < end; at++) set_bits(trie.bit_words[at], trie.bits[at]);
        if (begin < end) return;
        for (int32_t at = trie.first_token[node + 1]; at < trie.first_token[trie.skip[node]]; at++)
            if (trie.plain_from[at] <= trie.depth[node] + 1) set(trie.tokens[at]);
    }

    // Visits the tokens that a text may continue with in `start`: `found` gets those that are legal, `crosses` those whose legality depends on
    // the stack. With `known` >= 0, tokens that are plain from that byte on are left out. With `covers` tokens that are plain from some later
    // byte on are set at once where all are legal.
    template <class Found, class Crosses> void walk(const Trie &trie, int32_t start, int32_t known, bool covers, const Found &found, const Crosses &crosses) {
        int32_t nodes = (int32_t)trie.byte.size();
        state_at.resize((size_t)vocabulary.longest + 1);
        known_at.resize((size_t)vocabulary.longest + 1);
        stack_at.resize((size_t)vocabulary.longest + 1);
        state_at[0] = start;
        known_at[0] = known;
        stack_at[0].clear();
        for (int32_t node = 0; node < nodes;) {
            int32_t depth = trie.depth[node], entry = entry_of(state_at[depth], automaton.class_of[trie.byte[node]]);
            steps++;
            if (entry < 0 || trie.reach[node] <= known_at[depth]) {
                node = trie.skip[node];
                continue;
            }
            int32_t to = target_of(entry);
            bool below = false; // whether the move leaves a part that the token did not begin
            if (automaton.symbols) {
                Ints &stack = stack_at[depth + 1];
                stack = stack_at[depth];
                const Move *move = special(entry);
                if (move && move->push >= 0) stack.push_back(move->push);
                while (to >= 0 && automaton.pop[to] >= 0 && !(below = stack.empty())) {
                    to = automaton.go[(size_t)automaton.pop[to] * automaton.symbols + stack.back()];
                    stack.pop_back();
                }
            }
            if (to < 0) {
                node = trie.skip[node];
                continue;
            }
            for (int32_t at = trie.first_token[node]; at < trie.first_token[node + 1]; at++) found(trie.tokens[at]);
            if (below) {
                for (int32_t at = trie.first_token[node + 1]; at < trie.first_token[trie.skip[node]]; at++) crosses(trie.tokens[at]);
                node = trie.skip[node];
                continue;
            }
            state_at[depth + 1] = to;
            known_at[depth + 1] = known_at[depth];
            if (covers && surely[to] > 0 && surely[to] >= trie.plain_characters[node]) {
                if (known_at[depth] < depth || trie.starts_plain[node]) set_plain(node);
                known_at[depth + 1] = depth + 1;
            }
            node++;
        }
        if (steps > limits.steps) exceeded("steps", limits.steps);
    }

    void walk_tokens(int32_t start, int32_t known) {
        walk(vocabulary.trie, start, known, true, [&](int32_t token) { set(token); }, [&](int32_t token) { crossing[start].push_back(token); });
    }

    struct Suffixes { // that are legal in a state
        std::vector<char> legal, crosses;
        Ints list;
    };

    const Suffixes &suffixes_of(int32_t state) {
        Suffixes &found = suffixes[state];
        if (!found.legal.empty()) return found;
        size_t count = vocabulary.suffix_start.size() - 1;
        found.legal.assign(count + 1, 0);
        found.crosses.assign(automaton.symbols ? count : 0, 0);
        walk(vocabulary.suffixes, state, -1, false, [&](int32_t suffix) { found.legal[suffix] = 1, found.list.push_back(suffix); },
             [&](int32_t suffix) { found.crosses[suffix] = 1, found.list.push_back(suffix); });
        return found;
    }

    // The same for tokens that are not plain, in a state where every plain character leads to one state. False, and nothing done, elsewhere.
    bool add_suffixes(int32_t start) {
        int32_t state = start, last = std::min(plain_row[start], (int32_t)vocabulary.by_characters.size() - 1);
        if (after_plain[start] == start) {
            const Suffixes &known = suffixes_of(start);
            for (int32_t suffix : known.list)
                for (int32_t at = vocabulary.suffix_start[suffix]; at < vocabulary.suffix_start[suffix + 1]; at++)
                    add_suffix(start, known, suffix, vocabulary.suffix_tokens[at]);
            return true;
        }
        for (int32_t count = 0; count < last; count++)
            if ((state = after_plain[state]) < 0) return false;
        state = start;
        for (int32_t count = 0; count <= last; count++, state = after_plain[state]) {
            const Suffixes &known = suffixes_of(state);
            for (auto &[suffix, token] : vocabulary.by_characters[count])
                if (known.legal[suffix] || (automaton.symbols && known.crosses[suffix])) add_suffix(start, known, suffix, token);
        }
        return true;
    }

    void add_suffix(int32_t start, const Suffixes &known, int32_t suffix, int32_t token) {
        if (known.legal[suffix]) set(token);
        else crossing[start].push_back(token);
    }

    // The number of the row that was built over a base: an equal one, or a new one.
    int32_t take_row(int32_t base) {
        if (base != -1) { // words that the base has anyway are no change
            const int32_t *plain = vocabulary.plain.data() + (size_t)(-2 - base) * vocabulary.words;
            auto is_same = [&](int32_t word) {
                row[word] |= (uint32_t)plain[word];
                if (row[word] != (uint32_t)plain[word]) return false;
                row[word] = 0, changed[word] = 0;
                return true;
            };
            touched.erase(std::remove_if(touched.begin(), touched.end(), is_same), touched.end());
        }
        std::sort(touched.begin(), touched.end());
        uint64_t hash = mixed((uint64_t)(base + 1000));
        for (int32_t word : touched) hash = mixed(hash ^ ((uint64_t)word << 32 | row[word]));
        int32_t found = -1;
        for (int32_t other : rows_by_hash[hash])
            if (is_equal(other, base)) found = other;
        if (found < 0) found = add_row(base), rows_by_hash[hash].push_back(found);
        for (int32_t word : touched) row[word] = 0, changed[word] = 0;
        touched.clear();
        return found;
    }

    bool is_equal(int32_t other, int32_t base) const {
        if (built_on[other] != base || (size_t)built_size[other] != touched.size()) return false;
        if (base_of[other] >= 0) { // dense
            const uint32_t *dense_row = dense.data() + (size_t)base_of[other] * vocabulary.words;
            return std::all_of(touched.begin(), touched.end(), [&](int32_t word) { return dense_row[word] == row[word]; });
        }
        for (size_t at = 0; at < touched.size(); at++) {
            size_t from = (size_t)change_start[other] + at;
            if (change_word[from] != touched[at] || change_value[from] != (int32_t)row[touched[at]]) return false;
        }
        return true;
    }

    int32_t add_row(int32_t base) {
        bool any_text = false, any_stop = false;
        for (int32_t word : touched) {
            any_text |= (row[word] & ~(uint32_t)vocabulary.stop_words[word]) != 0;
            any_stop |= (row[word] & (uint32_t)vocabulary.stop_words[word]) != 0;
        }
        status_of.push_back(any_text || base != -1 ? 1 : any_stop ? 2 : 4); // MaskStatus OK, COMPLETE, DEAD_END
        built_on.push_back(base);
        built_size.push_back((int32_t)touched.size());
        change_start.push_back((int32_t)change_word.size());
        if (touched.size() * 4 > (size_t)vocabulary.words) { // a change takes two words
            base_of.push_back((int32_t)(dense.size() / (size_t)vocabulary.words));
            size_t at = dense.size();
            dense.resize(at + (size_t)vocabulary.words, 0);
            if (base != -1) memcpy(dense.data() + at, vocabulary.plain.data() + (size_t)(-2 - base) * vocabulary.words, (size_t)vocabulary.words * 4);
            for (int32_t word : touched) dense[at + (size_t)word] = row[word];
        } else {
            base_of.push_back(base);
            for (int32_t word : touched) change_word.push_back(word), change_value.push_back((int32_t)row[word]);
        }
        check_size(4 * (int64_t)(dense.size() + 2 * change_word.size() + automaton.next.size()));
        return (int32_t)base_of.size() - 1;
    }

    void check_size(int64_t bytes) const {
        if (bytes > limits.bytes) exceeded("bytes", limits.bytes);
    }

    std::vector<int32_t> assembled() {
        change_start.push_back((int32_t)change_word.size());
        Ints leave = automaton.pop, byte_of(automaton.classes, -2), moves, cross_start, cross;
        for (int32_t state = 0; state < automaton.states; state++)
            if (automaton.accepts[state]) leave[state] = -2;
        for (int byte = 0; byte < 256; byte++) {
            int32_t &only = byte_of[automaton.class_of[byte]];
            only = only == -2 ? byte : -1;
        }
        for (const Move &move : automaton.moves) {
            for (int32_t value : {move.target, move.push, move.counter, move.last_target}) moves.push_back(value);
            moves.insert(moves.end(), move.sets.begin(), move.sets.end());
            moves.insert(moves.end(), move.last_sets.begin(), move.last_sets.end());
        }
        int32_t most = 0;
        for (const Ints &tokens : crossing) {
            cross_start.push_back((int32_t)cross.size());
            cross.insert(cross.end(), tokens.begin(), tokens.end());
            most = std::max(most, (int32_t)tokens.size());
        }
        cross_start.push_back((int32_t)cross.size());
        std::vector<int32_t> image(IMAGE_HEADER, 0);
        auto table = [&](int field, const auto &values) {
            image[field] = (int32_t)image.size();
            image.insert(image.end(), values.begin(), values.end());
            check_size(4 * (int64_t)image.size());
        };
        table(IMAGE_CLASS_OF, automaton.class_of);
        table(IMAGE_BYTE_OF, byte_of);
        table(IMAGE_NEXT, automaton.next);
        table(IMAGE_MOVES, moves);
        table(IMAGE_LEAVE, leave);
        table(IMAGE_RETURN, automaton.go);
        table(IMAGE_ROW_OF, row_of);
        table(IMAGE_BASE_OF, base_of);
        table(IMAGE_STATUS_OF, status_of);
        table(IMAGE_CHANGE_START, change_start);
        table(IMAGE_CHANGE_WORD, change_word);
        table(IMAGE_CHANGE_VALUE, change_value);
        table(IMAGE_DENSE, dense);
        table(IMAGE_CROSS_START, cross_start);
        table(IMAGE_CROSS, cross);
        image[IMAGE_FORMAT] = IMAGE_VERSION;
        image[IMAGE_SIZE] = (int32_t)image.size();
        image[IMAGE_STATES] = automaton.states;
        image[IMAGE_CLASSES] = automaton.classes;
        image[IMAGE_SYMBOLS] = automaton.symbols;
        image[IMAGE_FINISH_SETS] = automaton.finish_sets;
        image[IMAGE_START] = automaton.start;
        std::copy(automaton.counters.begin(), automaton.counters.end(), image.begin() + IMAGE_START_COUNTERS);
        image[IMAGE_ROWS] = (int32_t)base_of.size();
        image[IMAGE_CROSSING] = most;
        return image;
    }

    const Automaton &automaton;
    const Vocabulary &vocabulary;
    const Limits &limits;
    Ints plain_row, row_of; // [states]
    std::vector<Ints> crossing; // [states]
    Ints after_plain; // [states] the state after any plain character, or -1 if it is not one
    std::unordered_map<int32_t, Suffixes> suffixes; // by state
    Ints surely; // [states] every plain text of so many characters is legal
    Ints known_at; // by depth: plain_from up to which tokens are set already
    std::vector<uint32_t> row; // being built, [words]
    std::vector<char> changed; // [words]
    Ints touched; // words that are not zero
    Ints base_of, status_of, built_on, built_size, change_start, change_word, change_value; // rows
    std::vector<uint32_t> dense;
    std::unordered_map<uint64_t, Ints> rows_by_hash;
    Ints state_at; // by depth
    std::vector<Ints> stack_at;
    int64_t steps = 0;
};

} // namespace

std::vector<int32_t> build_image(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits) {
    return Masks(automaton, vocabulary, limits).image();
}

} // namespace stepgraph
