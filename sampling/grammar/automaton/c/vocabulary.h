// The tokens of a vocabulary as trees of bytes.

#pragma once

#include "interned.h"

#include <array>
#include <iterator>

extern "C" {
#include "image.h"
}

namespace stepgraph {

// Plain characters are those that may occur unescaped anywhere in a JSON string.
struct PlainText {
    static constexpr int STATES = 10; // state 0: between characters
    int8_t next[STATES][256];
    PlainText();
    int32_t count(const uint8_t *text, int32_t size) const; // of characters, -1 if a part of the text is not plain
};
extern const PlainText plain_text;

// Groups of bytes that grammars mostly treat in the same way; all other bytes are one group.
struct ByteGroups {
    static constexpr int OTHERS = 63, WORDS[] = {1, 3, 4, 0, 2}; // WORDS: the groups of letters and digits, groups with most tokens first
    uint8_t of[256];
    ByteGroups();
};
extern const ByteGroups byte_groups;

// The tokens in sorted order as a tree of bytes, level by level: the children of a node are adjacent.
struct Trie {
    static constexpr int32_t ROOT = 0;
    struct Node { // 32 bytes, two per cache line: a walk reads most fields
        uint64_t groups; // groups of the bytes after this node: see ByteGroups
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

// There is a tree of tokens for each part: by whether a token is plain text and by its number of quotes; plain tokens also by length. Few
// tokens are not plain, few are long.
struct Part { bool is_plain; int32_t quotes, shortest, longest; }; // quotes: in the last part, or more
constexpr int32_t ANY_LENGTH = 1 << 30;
constexpr Part PARTS[] = {{true, 0, 1, 8}, {true, 0, 9, 16}, {true, 0, 17, ANY_LENGTH}, {false, 0, 1, ANY_LENGTH},
    {false, 1, 1, ANY_LENGTH}, {false, 2, 1, ANY_LENGTH}};
constexpr size_t NUM_PARTS = std::size(PARTS);

constexpr int32_t MAX_TOKEN_BYTES = 1024; // a walk takes stack for each byte of a token, and `plain` a row for each character

struct Vocabulary {
    Vocabulary(const uint8_t *text, const int32_t *starts, int32_t num_tokens, const Ints &stops, const Ints &hidden, int32_t words);
    image_vocabulary view() const;

    std::vector<uint8_t> text;
    Ints starts, stops, stop_words, hidden_words, plain;
    int32_t words, longest = 0, longest_plain = 0; // longest: in bytes, longest_plain: in characters
    std::vector<Trie> tries; // of parts of the tokens: states that differ only in one part share the others. See PARTS
};

} // namespace stepgraph
