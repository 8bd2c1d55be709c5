// Mask rows of an automaton over a vocabulary, and the image that holds both.

#pragma once

#include "automaton.h"

#include <memory>

extern "C" {
#include "image.h"
}

namespace stepgraph {

// The tokens in sorted order as a tree of bytes, level by level: the children of a node are neighbours. The tokens below a node whose text
// after it is plain are known: in a state from which every plain text is legal they are set at once, and only nodes that have other tokens
// below them are visited.
struct Trie {
    static constexpr int32_t ROOT = 0, MOST_BYTES = (1 << 15) - 1;
    struct Node { // two in a cache line: a walk reads most of it
        uint64_t groups; // of the bytes after this node: see ByteGroups in masks.cpp
        int32_t first_child; // in `nodes`, up to the first one of the next node
        int32_t first_token, below_token, end_token; // the tokens that end here, and from `below_token` on those below
        int32_t reach; // the largest plain_from below or at the node
        uint16_t height; // the most bytes that a token has after this node, at most MOST_BYTES
        uint16_t plain_height : 15, starts_plain : 1; // the same of tokens that are plain after the node; whether one is, and not before
    };
    static_assert(sizeof(Node) == 32);
    std::vector<Node> nodes; // and one behind the last
    std::vector<uint8_t> bytes; // [nodes] the last byte of each
    Ints leaf_token; // [nodes] the only token at a node without nodes below it, or -1: most nodes are never read
    std::array<int32_t, 256> first_of{}; // the child of the root by its byte; 0: none
    Ints tokens;
    Ints plain_from; // [tokens] the text of a token is plain from this byte on
    std::vector<std::vector<uint32_t>> plain_after; // [bytes] one bit per token, in their order here, that is plain from that byte on
};

struct Vocabulary {
    Vocabulary(const uint8_t *text, const int32_t *starts, int32_t num_tokens, const Ints &stops, const Ints &hidden, int32_t words);
    image_vocabulary view() const;

    std::vector<uint8_t> text;
    Ints starts, stops, stop_words, hidden_words, plain;
    Ints place_in_order; // [tokens] in the order of their texts
    int32_t words, longest = 0, longest_plain = 0; // bytes, characters
    std::vector<Trie> tries; // of parts of the tokens: states that differ only for one part share the others. See `parts` in masks.cpp
    // Tokens that are not plain, by the suffix from their first character that is not plain.
    std::array<Trie, 2> suffixes; // those with at most one quote, and the others; their tokens are numbers of suffixes
    Ints suffix_start, suffix_tokens; // [suffixes + 1] into the tokens with this suffix
    std::vector<std::vector<std::pair<int32_t, int32_t>>> by_characters; // [characters before the suffix] (suffix, token)
};

// Plain characters are those that may be anywhere in a JSON string as they are.
struct PlainText {
    static constexpr int STATES = 10; // 0: between characters
    int8_t next[STATES][256];
    PlainText();
    int plain_from(const uint8_t *text, int size) const; // the first byte from which on all characters are plain; `size` if none
    int plain_until(const uint8_t *text, int size) const; // the first byte that does not begin a plain character, or `size`
};

using Image = std::unique_ptr<int32_t, void (*)(void *)>; // allocated by malloc

Image build_image(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits);

} // namespace stepgraph
