// Mask rows of an automaton over a vocabulary, and the image that holds both.

#pragma once

#include "automaton.h"

extern "C" {
#include "image.h"
}

namespace stepgraph {

// The tokens in sorted order as a tree of bytes in preorder, and the bytes of the children of each node. The tokens below a node whose text after it is plain are known: in a state from
// which every plain text is legal they are set at once, and only nodes that have other tokens below them are visited.
struct Trie {
    struct Node { // in one cache line: a walk reads most of it
        int32_t depth, skip; // skip: the next node that is not below this one
        int32_t first_child; // in child_bytes and child_nodes, up to the first one of the next node
        int32_t first_token; // tokens that end here: up to the first one of the next node
        int32_t height; // the most bytes that a token has after this node
        int32_t reach; // the largest plain_from below or at the node
        int32_t plain_characters, plain_height; // the most characters and bytes that a token below has after the node, if they are plain
        uint8_t byte;
        bool starts_plain; // whether a token below is plain from the byte after the node on, and not before
        bool is_large; // whether there are many tokens below
    };
    std::vector<Node> nodes; // one behind the last, whose children are the nodes at the top, and one behind it
    std::vector<uint8_t> child_bytes;
    Ints child_nodes;
    int32_t root() const { return (int32_t)nodes.size() - 2; }
    Ints tokens;
    Ints plain_from; // [tokens] the text of a token is plain from this byte on
    std::vector<std::vector<uint32_t>> plain_after; // [bytes] one bit per token, in their order here, that is plain from that byte on
};

struct Vocabulary {
    Vocabulary(const uint8_t *text, const int32_t *starts, int32_t num_tokens, const Ints &stops, const Ints &hidden, int32_t words);
    image_vocabulary view() const;

    std::vector<uint8_t> text;
    Ints starts, stops, stop_words, hidden_words, plain;
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

std::vector<int32_t> build_image(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits);

} // namespace stepgraph
