// See vocabulary.h.

#include "vocabulary.h"

#include <cstring>

namespace stepgraph {

const PlainText plain_text;
const ByteGroups byte_groups;

PlainText::PlainText() {
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

int32_t PlainText::count(const uint8_t *text, int32_t size) const {
    int32_t state = 0, characters = 0;
    for (int32_t at = 0; at < size && state >= 0; at++) characters += (state = next[state][text[at]]) == 0;
    return state == 0 ? characters : -1;
}

ByteGroups::ByteGroups() {
    int groups = 5;
    for (int byte = 0; byte < 256; byte++) {
        bool is_hex = (byte | 32) <= 'f';
        if (byte >= '0' && byte <= '9') of[byte] = 4;
        else if (byte >= 'a' && byte <= 'z') of[byte] = is_hex ? 0 : 1;
        else if (byte >= 'A' && byte <= 'Z') of[byte] = is_hex ? 2 : 3;
        else of[byte] = byte >= ' ' && byte < 0x7F ? (uint8_t)groups++ : OTHERS;
    }
}

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

} // namespace stepgraph
