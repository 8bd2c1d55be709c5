// Mask rows of an automaton over a vocabulary, and the image that holds both.

#pragma once

#include "automaton.h"

#include <memory>

namespace stepgraph {

// The tokens in sorted order as a tree of bytes, level by level: the children of a node are adjacent.
struct Trie {
    static constexpr int32_t ROOT = 0;
    struct Node { // 32 bytes, two per cache line: a walk reads most fields
        uint64_t groups; // groups of the bytes after this node: see ByteGroups in masks.cpp
        int32_t first_child; // index in `nodes`; the children end before the first child of the next node
        int32_t first_token, below_token, end_token; // the tokens that end here; from `below_token` on, those below
        int32_t height; // maximum number of bytes that a token has after this node
    };
    static_assert(sizeof(Node) == 32);
    std::vector<Node> nodes; // with one more after the last
    std::vector<uint8_t> bytes; // [nodes] the last byte of each
    Ints leaf_token; // [nodes] the only token at a node without children, or -1; saves reading most nodes
    std::array<int32_t, 256> first_of{}; // [bytes] the child of the root; 0: none
    Ints tokens;
    bool is_plain = false; // all tokens are plain text
};

constexpr int32_t MAX_TOKEN_BYTES = 1024; // a walk takes stack for each byte of a token, and `plain` a row for each character

struct Vocabulary {
    Vocabulary(const uint8_t *text, const int32_t *starts, int32_t num_tokens, const Ints &stops, const Ints &hidden, int32_t words);
    image_vocabulary view() const;

    std::vector<uint8_t> text;
    Ints starts, stops, stop_words, hidden_words, plain;
    int32_t words, longest = 0, longest_plain = 0; // longest: in bytes, longest_plain: in characters
    std::vector<Trie> tries; // of parts of the tokens: states that differ only in one part share the others. See PARTS in masks.cpp
};

using Image = std::unique_ptr<int32_t, void (*)(void *)>; // allocated by malloc

Image build_image(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits);

} // namespace stepgraph
