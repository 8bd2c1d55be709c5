// See masks.h. The row of a state is found by walking the tree of tokens from it. Three things make that cheap: most tokens are plain text,
// whose rows inside strings are known beforehand by their number of characters; the other tokens have few different suffixes from their
// first character that is not plain; and a part of the tree is walked once for all states that behave alike for every text of its height.

#include "masks.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

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

constexpr int32_t SHARED_TOKENS = 100; // below a node

static Trie make_trie(const std::vector<Entry> &sorted) {
    Trie trie;
    std::vector<Trie::Node> &nodes = trie.nodes;
    Ints path; // nodes from the root to the previous token
    const uint8_t *previous = nullptr;
    for (const auto &[text, size, id] : sorted) {
        int32_t shared = 0;
        while (shared < (int32_t)path.size() && shared < size && previous[shared] == text[shared]) shared++;
        for (; (int32_t)path.size() > shared; path.pop_back()) nodes[(size_t)path.back()].skip = (int32_t)nodes.size();
        for (int32_t at = shared; at < size; at++) {
            path.push_back((int32_t)nodes.size());
            nodes.push_back({at, -1, (int32_t)trie.tokens.size(), 0, 0, 0, 0, text[at], false, false});
        }
        int32_t from = plain_text.plain_from(text, size);
        for (int32_t at = 0; at < size; at++) {
            Trie::Node &node = nodes[(size_t)path[at]];
            node.reach = std::max(node.reach, from);
            node.height = std::max(node.height, size - at - 1);
            if (at + 1 < from) continue;
            if (at + 1 == from && from < size) node.starts_plain = true;
            node.plain_characters = std::max(node.plain_characters, count_characters(text + at + 1, size - at - 1));
            node.plain_height = std::max(node.plain_height, size - at - 1);
        }
        trie.tokens.push_back(id);
        trie.plain_from.push_back(from);
        previous = text;
    }
    for (; !path.empty(); path.pop_back()) nodes[(size_t)path.back()].skip = (int32_t)nodes.size();
    nodes.push_back({0, -1, (int32_t)trie.tokens.size(), 0, 0, 0, 0, 0, false, false});
    for (size_t node = 0; node + 1 < nodes.size(); node++)
        nodes[node].is_large = nodes[(size_t)nodes[node].skip].first_token - nodes[node + 1].first_token >= SHARED_TOKENS;
    size_t longest = 0;
    for (const Entry &entry : sorted) longest = std::max(longest, (size_t)entry.size);
    trie.plain_after.assign(longest + 1, std::vector<uint32_t>(sorted.size() / 32 + 1, 0));
    for (size_t at = 0; at < trie.tokens.size(); at++)
        for (size_t bytes = (size_t)trie.plain_from[at]; bytes < trie.plain_after.size(); bytes++) trie.plain_after[bytes][at / 32] |= 1u << (at % 32);
    trie.top.fill(-1);
    for (size_t node = 0; node + 1 < nodes.size(); node = (size_t)nodes[node].skip) trie.top[nodes[node].byte] = (int32_t)node;
    return trie;
}

constexpr std::array<int32_t, 2> LONGEST_OF_PART = {8, 16}; // bytes of the tokens of each tree but the last
constexpr int32_t MAX_ALIKE = 16; // bytes
constexpr int64_t ALIKE_STEPS = 50'000'000; // moves that are compared to find states that are alike
// Followed before states that are alike are searched for, and before parts of the tree are shared, which takes longer where few states are alike.
constexpr int64_t MOVES_PER_STEP = 8, STEPS_PER_MOVE = 2;
constexpr size_t MAX_BELOW = 8'000'000; // words

static Ints bits_of(const Ints &tokens, int32_t words) {
    Ints row((size_t)words, 0);
    for (int32_t id : tokens) row[id / 32] |= (int32_t)(1u << (id % 32));
    return row;
}

Vocabulary::Vocabulary(
    const uint8_t *bytes, const int32_t *offsets, int32_t num_tokens, const Ints &stop_ids, const Ints &hidden_ids, int32_t words
)
    : text(bytes, bytes + offsets[num_tokens]), starts(offsets, offsets + num_tokens + 1), stops(stop_ids), stop_words(bits_of(stop_ids, words)),
      hidden_words(bits_of(hidden_ids, words)), words(words) {
    std::vector<Entry> entries;
    for (int32_t id = 0; id < num_tokens; id++) {
        int32_t size = starts[id + 1] - starts[id];
        if (hidden_words[id / 32] >> (id % 32) & 1) continue;
        if (size) entries.push_back({text.data() + starts[id], size, id});
        longest = std::max(longest, size);
    }
    std::sort(entries.begin(), entries.end(), in_text_order);
    for (size_t part = 0; part <= LONGEST_OF_PART.size(); part++) {
        std::vector<Entry> some;
        for (const Entry &entry : entries)
            if ((part == 0 || entry.size > LONGEST_OF_PART[part - 1]) && (part == LONGEST_OF_PART.size() || entry.size <= LONGEST_OF_PART[part]))
                some.push_back(entry);
        tries.push_back(make_trie(some));
    }
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
}

image_vocabulary Vocabulary::view() const {
    return {text.data(), starts.data(), plain.data(), stop_words.data(), hidden_words.data(), (int64_t)starts.size() - 1, longest_plain + 1, words, longest};
}

namespace {

uint64_t mixed(uint64_t value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}

// A row of bits.
struct Row {
    std::vector<uint32_t> bits; // [words]
    Ints touched; // words that are not zero

    explicit Row(std::vector<uint32_t> zeros) : bits(std::move(zeros)) {}

    void set(int32_t word, uint32_t more) {
        if (!bits[word]) touched.push_back(word);
        bits[word] |= more;
    }

    uint64_t hash() const { // in any order of `touched`
        uint64_t sum = 0;
        for (int32_t word : touched) sum += mixed((uint64_t)word << 32 | bits[word]);
        return sum;
    }

    void sort_touched() {
        if (touched.size() * 8 < bits.size()) return std::sort(touched.begin(), touched.end());
        touched.clear();
        for (size_t word = 0; word < bits.size(); word++)
            if (bits[word]) touched.push_back((int32_t)word);
    }

    void clear() {
        for (int32_t word : touched) bits[word] = 0;
        touched.clear();
    }
};

class Masks {
public:
    Masks(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits)
        : automaton(automaton), vocabulary(vocabulary), limits(limits), narrow(std::max((size_t)automaton.states, automaton.moves.size() + 1) <= 1 << 15), bytes_of(automaton.classes), row(std::vector<uint32_t>((size_t)vocabulary.words, 0)),
          ordered(std::vector<uint32_t>(vocabulary.starts.size() / 32 + 1, 0)), state_at(vocabulary.longest + 1), known_at(vocabulary.longest + 1), stack_at(vocabulary.longest + 1) {
        for (int byte = 0; byte < 256; byte++) bytes_of[automaton.class_of[byte]].push_back((uint8_t)byte);
    }

    std::vector<int32_t> image() {
        find_plain_rows();
        row_of.assign(automaton.states, -1);
        crossing.resize(automaton.symbols ? automaton.states : 0);
        for (int32_t state = 0; state < automaton.states; state++) {
            if (automaton.pop[state] >= 0) continue; // a text is never in it
            int64_t moves = (int64_t)automaton.next.size();
            if (alike.empty() && steps > moves / MOVES_PER_STEP) find_alike();
            shares_parts = steps > STEPS_PER_MOVE * moves;
            int32_t base = plain_row[state] > 0 ? -2 - plain_row[state] : -1;
            if (automaton.symbols) crossed = &crossing[state];
            int32_t *known = nullptr; // the row of a state with the same parts
            if (base == -1) {
                std::array<int32_t, PARTS + 1> parts{};
                for (size_t part = 0; part < PARTS; part++) {
                    const Below &found = below[(size_t)part_of(state, part)];
                    parts[part] = found.bits;
                    if (automaton.symbols) append_crossed(found);
                }
                parts[PARTS] = automaton.accepts[state];
                known = &row_of_parts.emplace(parts, -1).first->second;
                for (size_t part = 0; *known < 0 && part < PARTS; part++) {
                    const Range &range = ranges[(size_t)parts[part]];
                    for (size_t at = range.begin; at < range.end; at++) set_ordered(vocabulary.tries[part], below_bits[at].first, below_bits[at].second);
                }
            } else if (!add_suffixes(state) && !add_like_rest(state)) {
                for (const Trie &trie : vocabulary.tries) {
                    walk_tokens(trie, state, 0);
                    for (int32_t word : ordered.touched) set_ordered(trie, word, ordered.bits[word]);
                    ordered.clear();
                }
            }
            if (automaton.symbols) std::sort(crossing[state].begin(), crossing[state].end());
            if (known && *known >= 0) {
                row_of[state] = *known;
                continue;
            }
            if (automaton.accepts[state])
                for (int32_t stop : vocabulary.stops) set(stop);
            row_of[state] = take_row(base);
            if (known) *known = row_of[state];
        }
        return assembled();
    }

private:
    static constexpr size_t PARTS = LONGEST_OF_PART.size() + 1;

    struct Range { size_t begin, end; };
    struct Below { // tokens below a node, or of a whole tree
        int32_t bits; // in `ranges`
        Range crossed; // of below_crossed
        int32_t followed; // bytes that decided it
    };

    const Move *special(int32_t entry) const { return entry >= SPECIAL ? &automaton.moves[entry - SPECIAL] : nullptr; }
    // The state of a move inside a loop that has many iterations left.
    int32_t target_of(int32_t entry) const { return entry >= SPECIAL ? automaton.moves[entry - SPECIAL].target : entry; }
    int32_t entry_of(int32_t state, int32_t c) const { return automaton.next[(size_t)state * automaton.classes + c]; }

    void set(int32_t token) { row.set(token / 32, 1u << (token % 32)); }

    // For each state the number n such that its plain tokens are exactly those of at most n characters; 0 if there is no such number.
    void find_plain_rows() {
        int32_t longest = vocabulary.longest_plain, states = automaton.states;
        plain_row.assign(states, 0);
        surely.assign(states, 0);
        after_plain.assign(states, -1);
        rest_of.assign(states, -1);
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
        for (int32_t state = 0; state < states; state++)
            for (int32_t to : after[state])
                if (after_plain[to] == to) rest_of[state] = to;
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

    // Classes of states from which the same texts of at most n bytes can be read, with the same symbols left and added, for n from 0 on. After
    // the last n all are final, or as many as the work allows. Each round divides the classes of the one before that have several states.
    void find_alike() {
        size_t classes = (size_t)automaton.classes;
        alike.assign(1, automaton.pop);
        int32_t count = automaton.finish_sets;
        std::vector<Ints> open((size_t)count + 1), still; // classes of several states
        for (int32_t state = 0; state < automaton.states; state++) open[(size_t)automaton.pop[state] + 1].push_back(state);
        open.erase(std::remove_if(open.begin(), open.end(), [](const Ints &states) { return states.size() < 2; }), open.end());
        std::unordered_map<uint64_t, std::vector<Ints>> parts; // of one class
        struct Run { int32_t entry; size_t end; uint64_t factor; }; // neighbouring classes with one entry: `end` is behind the last
        std::vector<Run> runs;
        std::vector<size_t> run_start{0}; // [states + 1]
        for (int32_t state = 0; state < automaton.states; state++) {
            for (size_t c = 0; c < classes; c++) {
                int32_t entry = entry_of(state, (int32_t)c);
                if (!c || entry != runs.back().entry) runs.push_back({entry, c, 0});
                runs.back().end = c + 1;
                runs.back().factor += mixed(c + 1); // the terms of the hash do not wait for each other
            }
            run_start.push_back(runs.size());
        }
        for (int64_t work = 0; alike.size() <= MAX_ALIKE && !is_final && work <= ALIKE_STEPS;) {
            const Ints &last = alike.back();
            auto class_after = [&](int32_t entry) -> int64_t {
                if (entry < 0) return -2;
                const Move *move = special(entry);
                return !move ? last[entry] : move->target < 0 ? -2 : last[move->target] | ((int64_t)move->push + 1) << 32;
            };
            auto is_equal = [&](int32_t state, int32_t other) {
                for (size_t at = run_start[state], with = run_start[other]; at < run_start[state + 1];) {
                    if (class_after(runs[at].entry) != class_after(runs[with].entry)) return false;
                    size_t end = std::min(runs[at].end, runs[with].end);
                    at += runs[at].end == end;
                    with += runs[with].end == end;
                }
                return true;
            };
            Ints found = last;
            is_final = true;
            still.clear();
            for (const Ints &members : open) {
                parts.clear();
                for (int32_t state : members) {
                    uint64_t hash = 0;
                    for (size_t at = run_start[state]; at < run_start[state + 1]; at++) hash += (uint64_t)class_after(runs[at].entry) * runs[at].factor;
                    work += (int64_t)(run_start[state + 1] - run_start[state]);
                    std::vector<Ints> &same = parts[hash];
                    auto part = std::find_if(same.begin(), same.end(), [&](const Ints &states) { return is_equal(state, states[0]); });
                    if (part == same.end()) part = same.insert(part, Ints());
                    part->push_back(state);
                }
                int32_t number = last[members[0]]; // of the first part
                for (auto &[hash, same] : parts)
                    for (Ints &part : same) {
                        for (int32_t state : part) found[state] = number;
                        if (part.size() > 1) still.push_back(std::move(part));
                        is_final &= number == last[members[0]];
                        number = count++;
                    }
                count--; // the last was not used
            }
            open.swap(still);
            alike.push_back(std::move(found));
        }
        alike_classes = count;
    }

    // The tokens of one tree that are legal in a state, as a number in `below`. States from which the same texts can be read, of as many bytes
    // as decided it, have it in common.
    int32_t part_of(int32_t state, size_t part) {
        auto &known = parts_like[part];
        for (size_t bytes = 0; bytes < known.size(); bytes++)
            if (!known[bytes].empty())
                if (int32_t like = known[bytes][(size_t)alike[bytes][state] + 1]; like >= 0) return like;
        followed = 1; // also in a state that reads no byte
        const Trie &trie = vocabulary.tries[part];
        int32_t found = keep_below(true, [&] { walk_tokens(trie, state, -1); });
        if (alike.empty() || (followed >= (int32_t)alike.size() && !is_final)) return found;
        size_t bytes = std::min((size_t)followed, alike.size() - 1);
        if (known.size() <= bytes) known.resize(bytes + 1);
        known[bytes].resize((size_t)alike_classes + 1, -1);
        return known[bytes][(size_t)alike[bytes][state] + 1] = found;
    }

    // Whether tokens below a node are found for a class of states at a time.
    bool is_shared(const Trie &trie, int32_t node) const {
        return trie.nodes[node].is_large && shares_parts && !alike.empty() && (trie.nodes[node].height < (int32_t)alike.size() || is_final);
    }

    // Find the tokens below a node of a tree in a state after it, in which they began. False where they are unknown and there is no room for them.
    bool add_below(const Trie &trie, int32_t node, int32_t state) {
        const Ints &classes = alike[std::min((size_t)trie.nodes[node].height, alike.size() - 1)];
        auto &known = below_node[(size_t)(&trie - vocabulary.tries.data())];
        uint64_t key = (uint64_t)node << 32 | (uint32_t)classes[state];
        auto at = known.find(key);
        if (at == known.end()) {
            if (below_bits.size() + below_crossed.size() > MAX_BELOW) return false;
            int32_t before = std::exchange(followed, 0);
            at = known.emplace(key, keep_below(false, [&] { walk_part(trie, state, -1, node + 1, trie.nodes[node].skip); })).first;
            followed = before;
        }
        const Below &found = below[(size_t)at->second];
        followed = std::max(followed, found.followed);
        const Range &range = ranges[(size_t)found.bits];
        for (size_t index = range.begin; index < range.end; index++) ordered.set(below_bits[index].first, below_bits[index].second);
        append_crossed(found);
        return true;
    }

    // Keeps the tokens that `walk` finds, without those found so far. Returns their number in `below`. With `interned`, equal bits are one range.
    template <class Walk> int32_t keep_below(bool interned, const Walk &walk) {
        if (level == spares.size()) spares.emplace_back(std::vector<uint32_t>(ordered.bits.size(), 0));
        Row &spare = spares[level++];
        std::swap(ordered, spare);
        Ints found, *outer = std::exchange(crossed, &found);
        walk();
        crossed = outer;
        int32_t bits = interned ? equal_range() : -1;
        if (bits < 0) {
            bits = (int32_t)ranges.size();
            size_t begin = below_bits.size();
            for (int32_t word : ordered.touched) below_bits.push_back({word, ordered.bits[word]});
            ranges.push_back({begin, below_bits.size()});
        }
        size_t begin = below_crossed.size();
        below_crossed.insert(below_crossed.end(), found.begin(), found.end());
        ordered.clear();
        std::swap(ordered, spare);
        level--;
        below.push_back({bits, {begin, below_crossed.size()}, followed});
        return (int32_t)below.size() - 1;
    }

    // A range with the bits in `ordered`, or -1: then the next one is expected to be it.
    int32_t equal_range() {
        Ints &same = ranges_by_hash[ordered.hash()];
        for (int32_t number : same) {
            const Range &range = ranges[(size_t)number];
            auto is_equal = [&](const std::pair<int32_t, uint32_t> &found) { return ordered.bits[found.first] == found.second; };
            bool has_size = range.end - range.begin == ordered.touched.size();
            if (has_size && std::all_of(below_bits.begin() + (int64_t)range.begin, below_bits.begin() + (int64_t)range.end, is_equal)) return number;
        }
        same.push_back((int32_t)ranges.size());
        return -1;
    }

    void append_crossed(const Below &found) {
        auto begin = below_crossed.begin();
        crossed->insert(crossed->end(), begin + (int64_t)found.crossed.begin, begin + (int64_t)found.crossed.end);
    }

    // Set tokens that are given by their place in the order of a tree.
    void set_ordered(const Trie &trie, int32_t word, uint32_t bits) {
        for (; bits; bits &= bits - 1) set(trie.tokens[(size_t)word * 32 + (size_t)__builtin_ctz(bits)]);
    }

    // Set the tokens below a node whose text after it is plain.
    void set_plain(const Trie &trie, int32_t node) {
        const std::vector<uint32_t> &plain = trie.plain_after[(size_t)trie.nodes[node].depth + 1];
        int32_t begin = trie.nodes[node + 1].first_token, end = trie.nodes[trie.nodes[node].skip].first_token;
        for (int32_t word = begin / 32; word * 32 < end; word++) {
            uint32_t bits = plain[word];
            if (word == begin / 32) bits &= ~0u << (begin % 32);
            if (end - word * 32 < 32) bits &= ~(~0u << (end % 32));
            if (bits) ordered.set(word, bits);
        }
    }

    // Visits the tokens in nodes begin..end that a text may continue with in `start`: `found` gets the places of those that are legal, `crosses` those whose legality depends on
    // the stack. With `known` >= 0, tokens that are plain from that byte on are left out. With `covers` tokens that are plain from some later
    // byte on are set at once where all are legal.
    template <class Found, class Crosses> void walk(const Trie &trie, int32_t start, int32_t known, bool covers, const Found &found, const Crosses &crosses,
                                                         int32_t begin, int32_t end) {
        if (begin == end) return;
        int32_t first = trie.nodes[begin].depth;
        state_at[first] = start;
        known_at[first] = known;
        stack_at[first].clear();
        for (int32_t node = begin; node < end;) {
            int32_t depth = trie.nodes[node].depth, entry = entry_of(state_at[depth], automaton.class_of[trie.nodes[node].byte]);
            steps++;
            followed = std::max(followed, depth + 1);
            if (entry < 0 || trie.nodes[node].reach <= known_at[depth]) {
                node = trie.nodes[node].skip;
                continue;
            }
            int32_t to = target_of(entry);
            bool below = false; // whether the move leaves a part that the token did not begin
            if (automaton.symbols) {
                Ints &stack = stack_at[depth + 1];
                if (stack_at[depth].empty()) stack.clear();
                else stack = stack_at[depth];
                const Move *move = special(entry);
                if (move && move->push >= 0) stack.push_back(move->push), pushes = std::max(pushes, (int32_t)stack.size());
                while (to >= 0 && automaton.pop[to] >= 0 && !(below = stack.empty())) {
                    to = automaton.go[(size_t)automaton.pop[to] * automaton.symbols + stack.back()];
                    stack.pop_back();
                }
            }
            if (to < 0) {
                node = trie.nodes[node].skip;
                continue;
            }
            for (int32_t at = trie.nodes[node].first_token; at < trie.nodes[node + 1].first_token; at++) found(at);
            if (below) {
                for (int32_t at = trie.nodes[node + 1].first_token; at < trie.nodes[trie.nodes[node].skip].first_token; at++) crosses(at);
                node = trie.nodes[node].skip;
                continue;
            }
            if (covers && known_at[depth] < 0 && stack_at[depth + 1].empty() && is_shared(trie, node) && add_below(trie, node, to)) {
                node = trie.nodes[node].skip;
                continue;
            }
            state_at[depth + 1] = to;
            known_at[depth + 1] = known_at[depth];
            if (covers && surely[to] > 0 && surely[to] >= trie.nodes[node].plain_characters) {
                if (known_at[depth] < depth || trie.nodes[node].starts_plain) set_plain(trie, node);
                known_at[depth + 1] = depth + 1;
                followed = std::max(followed, depth + 1 + trie.nodes[node].plain_height);
            }
            node++;
        }
        if (steps > limits.steps) exceeded("steps", limits.steps);
    }

    // The same for all nodes. Only those of bytes that `start` reads are visited at the top, where a tree has most children.
    template <class Found, class Crosses> void walk_all(const Trie &trie, int32_t start, int32_t known, bool covers, const Found &found, const Crosses &crosses) {
        for (int32_t c = 0; c < automaton.classes; c++)
            if (entry_of(start, c) >= 0)
                for (uint8_t byte : bytes_of[c])
                    if (int32_t node = trie.top[byte]; node >= 0) walk(trie, start, known, covers, found, crosses, node, trie.nodes[node].skip);
    }

    // Find the tokens of a tree, or those in a part of it.
    void walk_tokens(const Trie &trie, int32_t start, int32_t known) {
        walk_all(trie, start, known, true, [&](int32_t at) { ordered.set(at / 32, 1u << (at % 32)); }, [&](int32_t at) { crossed->push_back(trie.tokens[at]); });
    }

    void walk_part(const Trie &trie, int32_t start, int32_t known, int32_t begin, int32_t end) {
        auto found = [&](int32_t at) { ordered.set(at / 32, 1u << (at % 32)); };
        walk(trie, start, known, true, found, [&](int32_t at) { crossed->push_back(trie.tokens[at]); }, begin, end);
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
        const Ints &numbers = vocabulary.suffixes.tokens;
        walk_all(vocabulary.suffixes, state, -1, false, [&](int32_t at) { found.legal[numbers[at]] = 1, found.list.push_back(numbers[at]); },
             [&](int32_t at) { found.crosses[numbers[at]] = 1, found.list.push_back(numbers[at]); });
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

    // The tokens that are not plain, in a state where most plain characters lead to a state that they do not leave: the tokens of that
    // state, but for texts that lead elsewhere. False, and nothing done, in others.
    bool add_like_rest(int32_t start) {
        int32_t rest = rest_of[start];
        if (rest < 0 || plain_row[start] != plain_row[rest]) return false;
        const Suffixes &known = suffixes_of(rest);
        for (int32_t suffix : known.list)
            for (int32_t at = vocabulary.suffix_start[suffix]; at < vocabulary.suffix_start[suffix + 1]; at++)
                add_suffix(start, known, suffix, vocabulary.suffix_tokens[at]);
        left_out.clear();
        added.clear();
        for (int32_t c = 0; c < automaton.classes; c++)
            if (entry_of(start, c) != entry_of(rest, c))
                for (uint8_t byte : bytes_of[c])
                    for (const Trie &trie : vocabulary.tries)
                        if (int32_t node = trie.top[byte]; node >= 0) exchange(trie, start, rest, node, trie.nodes[node].skip);
        if (left_out.empty() && added.empty()) return true;
        Ints &tokens = crossing[start];
        std::sort(left_out.begin(), left_out.end());
        auto is_left_out = [&](int32_t token) { return std::binary_search(left_out.begin(), left_out.end(), token); };
        tokens.erase(std::remove_if(tokens.begin(), tokens.end(), is_left_out), tokens.end());
        tokens.insert(tokens.end(), added.begin(), added.end());
        return true;
    }

    // In nodes begin..end, exchange the tokens of state `from` that are not plain for those of `to`.
    void exchange(const Trie &trie, int32_t to, int32_t from, int32_t begin, int32_t end) {
        auto is_simple = [&](int32_t entry) { return entry >= 0 && entry < SPECIAL && automaton.pop[entry] < 0; };
        for (int32_t node = begin; node < end; node = trie.nodes[node].skip) {
            int32_t c = automaton.class_of[trie.nodes[node].byte], entry = entry_of(to, c), other = entry_of(from, c);
            steps++;
            if (trie.nodes[node].reach <= 0 || entry == other) continue;
            if (is_simple(entry) && is_simple(other)) {
                exchange(trie, entry, other, node + 1, trie.nodes[node].skip);
                continue;
            }
            auto unset = [&](int32_t at) { row.bits[trie.tokens[at] / 32] &= ~(1u << (trie.tokens[at] % 32)); };
            walk(trie, from, 0, false, unset, [&](int32_t at) { left_out.push_back(trie.tokens[at]); }, node, trie.nodes[node].skip);
            walk(trie, to, 0, false, [&](int32_t at) { set(trie.tokens[at]); }, [&](int32_t at) { added.push_back(trie.tokens[at]); }, node, trie.nodes[node].skip);
        }
    }

    void add_suffix(int32_t start, const Suffixes &known, int32_t suffix, int32_t token) {
        if (known.legal[suffix]) set(token);
        else crossing[start].push_back(token);
    }

    // The number of the row that was built over a base: an equal one, or a new one.
    int32_t take_row(int32_t base) {
        row.sort_touched();
        if (base != -1) { // words that the base has anyway are no change
            const int32_t *plain = vocabulary.plain.data() + (size_t)(-2 - base) * vocabulary.words;
            auto is_same = [&](int32_t word) {
                row.bits[word] |= (uint32_t)plain[word];
                if (row.bits[word] != (uint32_t)plain[word]) return false;
                row.bits[word] = 0;
                return true;
            };
            row.touched.erase(std::remove_if(row.touched.begin(), row.touched.end(), is_same), row.touched.end());
        }
        uint64_t hash = mixed(row.hash() + (uint64_t)base);
        int32_t found = -1;
        for (int32_t other : rows_by_hash[hash])
            if (is_equal(other, base)) found = other;
        if (found < 0) found = add_row(base), rows_by_hash[hash].push_back(found);
        row.clear();
        return found;
    }

    bool is_equal(int32_t other, int32_t base) const {
        if (built_on[other] != base || (size_t)built_size[other] != row.touched.size()) return false;
        if (base_of[other] >= 0) { // dense
            const uint32_t *dense_row = dense.data() + (size_t)base_of[other] * vocabulary.words;
            return std::all_of(row.touched.begin(), row.touched.end(), [&](int32_t word) { return dense_row[word] == row.bits[word]; });
        }
        for (size_t at = 0; at < row.touched.size(); at++) {
            size_t from = (size_t)change_start[other] + at;
            if (change_word[from] != row.touched[at] || change_value[from] != (int32_t)row.bits[row.touched[at]]) return false;
        }
        return true;
    }

    int32_t add_row(int32_t base) {
        bool any_text = false, any_stop = false;
        for (int32_t word : row.touched) {
            any_text |= (row.bits[word] & ~(uint32_t)vocabulary.stop_words[word]) != 0;
            any_stop |= (row.bits[word] & (uint32_t)vocabulary.stop_words[word]) != 0;
        }
        status_of.push_back(any_text || base != -1 ? 1 : any_stop ? 2 : 4); // MaskStatus OK, COMPLETE, DEAD_END
        built_on.push_back(base);
        built_size.push_back((int32_t)row.touched.size());
        change_start.push_back((int32_t)change_word.size());
        if (row.touched.size() * 4 > (size_t)vocabulary.words) { // a change takes two words
            base_of.push_back((int32_t)(dense.size() / (size_t)vocabulary.words));
            size_t at = dense.size();
            dense.resize(at + (size_t)vocabulary.words, 0);
            if (base != -1) memcpy(dense.data() + at, vocabulary.plain.data() + (size_t)(-2 - base) * vocabulary.words, (size_t)vocabulary.words * 4);
            for (int32_t word : row.touched) dense[at + (size_t)word] = row.bits[word];
        } else {
            base_of.push_back(base);
            for (int32_t word : row.touched) change_word.push_back(word), change_value.push_back((int32_t)row.bits[word]);
        }
        check_size(4 * (int64_t)(dense.size() + 2 * change_word.size() + automaton.next.size() / (narrow ? 2 : 1)));
        return (int32_t)base_of.size() - 1;
    }

    // The most symbols that a legal token has on the stack at a time. After a token has left the part in which it began, its next moves are
    // not known, and every byte that some move pushes for counts.
    int32_t most_pushes() const {
        std::vector<char> may_push(automaton.classes, 0), seen(vocabulary.starts.size(), 0);
        for (size_t at = 0; at < automaton.next.size(); at++)
            if (const Move *move = special(automaton.next[at]); move && move->push >= 0) may_push[at % automaton.classes] = 1;
        int32_t most = pushes;
        for (const Ints &tokens : crossing)
            for (int32_t token : tokens) {
                if (seen[token]) continue;
                seen[token] = 1;
                auto pushing = [&](uint8_t byte) { return may_push[automaton.class_of[byte]]; };
                const uint8_t *text = vocabulary.text.data();
                most = std::max(most, (int32_t)std::count_if(text + vocabulary.starts[token], text + vocabulary.starts[token + 1], pushing));
            }
        if (most > IMAGE_MAX_PUSHES) throw Unfit("a token that opens more than " + std::to_string(IMAGE_MAX_PUSHES) + " nested parts");
        return most;
    }

    void check_size(int64_t bytes) const {
        if (bytes > limits.bytes) exceeded("bytes", limits.bytes);
    }

    Ints entries() const { // of IMAGE_NEXT
        Ints packed(narrow ? (automaton.next.size() + 1) / 2 : automaton.next.size(), 0);
        for (size_t at = 0; at < automaton.next.size(); at++) {
            int32_t entry = automaton.next[at] < SPECIAL ? automaton.next[at] : -2 - (automaton.next[at] - SPECIAL);
            if (narrow) packed[at / 2] |= (int32_t)((uint32_t)(uint16_t)entry << at % 2 * 16);
            else packed[at] = entry;
        }
        return packed;
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
        std::vector<int32_t> image((IMAGE_HEADER + 3) / 4 * 4, 0);
        image[IMAGE_NARROW] = narrow;
        auto table = [&](int field, const auto &values) {
            image[field] = (int32_t)image.size();
            image.insert(image.end(), values.begin(), values.end());
            check_size(4 * (int64_t)image.size());
        };
        table(IMAGE_DENSE, dense);
        table(IMAGE_CLASS_OF, automaton.class_of);
        table(IMAGE_BYTE_OF, byte_of);
        table(IMAGE_NEXT, entries());
        table(IMAGE_MOVES, moves);
        table(IMAGE_LEAVE, leave);
        table(IMAGE_RETURN, automaton.go);
        table(IMAGE_ROW_OF, row_of);
        table(IMAGE_BASE_OF, base_of);
        table(IMAGE_STATUS_OF, status_of);
        table(IMAGE_CHANGE_START, change_start);
        table(IMAGE_CHANGE_WORD, change_word);
        table(IMAGE_CHANGE_VALUE, change_value);
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
        image[IMAGE_DEPTH] = automaton.symbols ? (int32_t)limits.depth : 0;
        image[IMAGE_FREE] = image[IMAGE_LIMITED] = automaton.states;
        image[IMAGE_LIMIT] = INT32_MAX;
        image[IMAGE_PUSHES] = automaton.symbols ? most_pushes() : 0;
        return image;
    }

    const Automaton &automaton;
    const Vocabulary &vocabulary;
    const Limits &limits;
    const bool narrow; // whether 16 bits hold each entry of IMAGE_NEXT
    std::vector<std::vector<uint8_t>> bytes_of; // [classes]
    Ints plain_row, row_of; // [states]
    std::vector<Ints> crossing; // [states]
    Ints after_plain; // [states] the state after any plain character, or -1 if it is not one
    Ints rest_of; // [states] a state after some plain character that no plain character leaves, or -1
    std::unordered_map<int32_t, Suffixes> suffixes; // by state
    Ints surely; // [states] every plain text of so many characters is legal
    std::vector<Ints> alike; // [bytes][states]
    int32_t alike_classes = 0; // the numbers of classes are below this
    std::array<std::vector<Ints>, PARTS> parts_like; // [bytes][class + 1] in `below`: a part that was found by following so many bytes, or -1
    std::map<std::array<int32_t, PARTS + 1>, int32_t> row_of_parts; // by parts, and whether the text may end
    int32_t followed = 0; // the most bytes of a token that decided the row, or the part of it, that is being walked
    bool shares_parts = false; // whether tokens below a node are found for several states at once
    bool is_final = false; // whether the last classes are the same for texts of any length
    std::vector<Below> below;
    std::vector<Range> ranges; // of below_bits
    std::unordered_map<uint64_t, Ints> ranges_by_hash; // of whole trees
    std::array<std::unordered_map<uint64_t, int32_t>, PARTS> below_node; // by node and class
    std::vector<std::pair<int32_t, uint32_t>> below_bits; // words of `ordered`
    Ints below_crossed, *crossed = nullptr; // tokens whose legality depends on the stack; of the state or the part that is being walked
    std::deque<Row> spares; // of the parts of the tree that are being walked
    size_t level = 0; // of these
    Row row, ordered; // being built; `ordered` has the bits of the tokens of a tree, in its order: those below a node are neighbours
    Ints state_at, known_at; // by depth; known: plain_from up to which tokens are set already
    std::vector<Ints> stack_at; // by depth
    Ints base_of, status_of, built_on, built_size, change_start, change_word, change_value; // rows
    std::vector<uint32_t> dense;
    std::unordered_map<uint64_t, Ints> rows_by_hash;
    Ints left_out, added; // crossing tokens of the state that is being exchanged
    int64_t steps = 0;
    int32_t pushes = 0; // the most symbols that the tokens walked so far had on the stack at a time
};

} // namespace

std::vector<int32_t> build_image(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits) {
    return Masks(automaton, vocabulary, limits).image();
}

} // namespace stepgraph
