// See characters.h.

#include "characters.h"

#include <algorithm>
#include <functional>
#include <map>

namespace stepgraph {

constexpr int32_t LAST_CODE_POINT = 0x10FFFF;
using ByteRanges = std::vector<Range>; // one range for each byte of an encoded character

static int encode(int32_t code, uint8_t *bytes) { // also surrogates, as the library does
    if (code < 0x80) return bytes[0] = (uint8_t)code, 1;
    int size = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (int at = size - 1; at > 0; at--, code >>= 6) bytes[at] = (uint8_t)(0x80 | (code & 0x3F));
    bytes[0] = (uint8_t)(lead[size] | code);
    return size;
}

// The encoded characters low..high as sequences of byte ranges.
static void byte_ranges(int32_t low, int32_t high, std::vector<ByteRanges> &out) {
    for (int32_t last : {0x7F, 0x7FF, 0xFFFF})
        if (low <= last && last < high) {
            byte_ranges(low, last, out);
            return byte_ranges(last + 1, high, out);
        }
    if (high > 0x7F)
        for (int at = 1; at < 4; at++) {
            int32_t rest = (1 << (6 * at)) - 1;
            if ((low & ~rest) == (high & ~rest)) continue;
            if (low & rest) {
                byte_ranges(low, low | rest, out);
                return byte_ranges((low | rest) + 1, high, out);
            }
            if ((high & rest) != rest) {
                byte_ranges(low, (high & ~rest) - 1, out);
                return byte_ranges(high & ~rest, high, out);
            }
        }
    uint8_t first[4], last[4];
    int size = encode(low, first);
    encode(high, last);
    ByteRanges found;
    for (int at = 0; at < size; at++) found.push_back({first[at], last[at]});
    out.push_back(found);
}

static std::vector<Range> merged(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end());
    std::vector<Range> out;
    for (Range range : ranges) {
        if (!out.empty() && range.first <= out.back().second + 1) out.back().second = std::max(out.back().second, range.second);
        else out.push_back(range);
    }
    return out;
}

std::vector<Range> class_ranges(const int32_t *content, int size) {
    std::vector<Range> ranges;
    for (int at = 1; at + 1 < size; at += 2) ranges.push_back({content[at], content[at + 1]});
    ranges = merged(ranges);
    if (!content[0]) return ranges;
    std::vector<Range> gaps;
    int32_t start = 0;
    for (Range range : ranges) {
        if (start < range.first) gaps.push_back({start, range.first - 1});
        start = range.second + 1;
    }
    if (start <= LAST_CODE_POINT) gaps.push_back({start, LAST_CODE_POINT});
    return gaps;
}

Shape shape_of(const std::vector<Range> &characters) {
    Shape shape;
    std::vector<ByteRanges> sequences;
    for (Range range : characters) byte_ranges(range.first, range.second, sequences);
    std::map<ByteRanges, int32_t> tails{{{}, 1}};
    std::function<int32_t(ByteRanges)> tail = [&](ByteRanges sequence) -> int32_t {
        auto known = tails.find(sequence);
        if (known != tails.end()) return known->second;
        int32_t from = tails[sequence] = shape.states++;
        int32_t to = tail(ByteRanges(sequence.begin() + 1, sequence.end()));
        shape.parts.push_back({from, sequence[0].first, sequence[0].second, to});
        return from;
    };
    for (const ByteRanges &sequence : sequences) {
        int32_t to = tail(ByteRanges(sequence.begin() + 1, sequence.end()));
        shape.parts.push_back({0, sequence[0].first, sequence[0].second, to});
    }
    return shape;
}

} // namespace stepgraph
