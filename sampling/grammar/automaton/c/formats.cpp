// See formats.h.

#include "formats.h"

#include "characters.h"

#include <array>

namespace stepgraph {

constexpr int MAX_HOST_NAMES = 3; // with more, strings become called automata

int32_t Formats::host_name(int longest, bool without_punycode, int32_t continuation) {
    if (calls != Calls::STRINGS && ++host_names > MAX_HOST_NAMES) exceeded("states", limits.states);
    constexpr int LABEL = 63;
    enum Last { HYPHEN, WORD, X, XN, XN_HYPHEN, LASTS }; // the latest characters; X to XN_HYPHEN: the label so far
    std::vector<std::array<std::array<int32_t, LASTS>, LABEL>> after((size_t)longest); // [left in the name][left in the label]
    auto words = [&](int32_t from, int32_t to, std::initializer_list<int> others) { // letters and digits except `others`
        for (auto [low, high] : {Range{'0', '9'}, Range{'A', 'Z'}, Range{'a', 'z'}}) {
            for (int other : others)
                if (low <= other && other <= high) edge(from, low, other - 1, to), low = other + 1;
            edge(from, low, high, to);
        }
    };
    Ints begin; // [left in the name] the start of a label
    for (int left = 0; left <= longest; left++) {
        for (int more = 0; more < std::min(left + 1, LABEL) && left < longest; more++) // more: left in the label
            for (int last = HYPHEN; last < LASTS; last++) {
                if (last >= X && !(without_punycode && more == std::min(left, LABEL - 1 - (last - X)))) continue;
                int32_t from = after[left][more][last] = state_before(continuation);
                if (last != HYPHEN && last != XN_HYPHEN) follow(from, continuation);
                if (last != HYPHEN && last != XN_HYPHEN && left > 1) edge(from, '.', '.', begin[left - 1]);
                if (!more) continue;
                const auto &next = after[left - 1][std::min(left - 1, more - 1)];
                if (more > 1 && last != XN_HYPHEN) edge(from, '-', '-', next[last == XN ? XN_HYPHEN : HYPHEN]);
                if (last == X) words(from, next[WORD], {'N', 'n'}), edge(from, 'N', 'N', next[XN]), edge(from, 'n', 'n', next[XN]);
                else words(from, next[WORD], {});
            }
        begin.push_back(state_before(continuation));
        if (!left) continue;
        const auto &first = after[left - 1][std::min(left - 1, LABEL - 1)];
        for (int byte : {'X', 'x'}) edge(begin[left], byte, byte, first[without_punycode ? X : WORD]);
        words(begin[left], first[WORD], {'X', 'x'});
    }
    return begin.back();
}

int32_t Formats::time(int32_t continuation) {
    int32_t start = state_before(continuation), any_digit = state_before(continuation), any_minute = state_before(continuation);
    auto number = [&](int value, int32_t to) { return byte_before('0' + value / 10, byte_before('0' + value % 10, to)); };
    edge(any_minute, '0', '5', any_digit), edge(any_digit, '0', '9', continuation);
    for (int minute = 0; minute < 60; minute++) nfa.calls.add(start, {first_time + minute, number(minute, continuation)});
    nfa.calls.add(start, {first_time + ANY_MINUTE, any_minute}), nfa.calls.add(start, {first_time + NO_OFFSET, continuation});
    if (time_start >= 0) return start;
    Ints ends;
    for (int end = 0; end < TIME_ENDS; end++) ends.push_back(state(-1)), nfa.states.back().final_of = first_time + end;
    auto hour_before = [&](int hour, int end) { return number(hour, byte_before(':', ends[end])); };
    auto after_second = [&](int32_t ahead, int32_t behind, bool is_utc) {
        int32_t found = state(-1), digit = state(-1), fraction = state(-1);
        edge(found, '.', '.', digit), edge(digit, '0', '9', fraction), follow(fraction, digit);
        for (int32_t from : {found, fraction}) {
            edge(from, '+', '+', ahead), edge(from, '-', '-', behind);
            for (int byte : {'Z', 'z'}) if (is_utc) edge(from, byte, byte, ends[IN_UTC]);
        }
        return found;
    };
    int32_t any_hour = state(-1), digit = state(-1);
    for (int hour = 0; hour < 24; hour++) follow(any_hour, hour_before(hour, ANY_HOUR));
    edge(digit, '0', '9', after_second(any_hour, any_hour, true));
    time_start = state(-1);
    for (int hour = 0, second_digit = -1; hour < 24; hour++) {
        int32_t tens = state(-1), ones = -1, seconds[] = {state(-1), state(-1)};
        if (hour % 10 == 0) edge(time_start, '0' + hour / 10, '0' + hour / 10, second_digit = state(-1));
        edge(second_digit, '0' + hour % 10, '0' + hour % 10, byte_before(':', tens));
        for (int carry : {0, 1}) {
            int32_t ahead = hour_before((hour + carry) % 24, AHEAD),
                leap = after_second(ahead, hour_before(23 - hour, BEHIND), hour + carry == 24);
            edge(seconds[carry], '0', '5', digit), edge(seconds[carry], '6', '6', byte_before('0', leap));
        }
        for (int minute = 0; minute < 60; minute++) {
            if (minute % 10 == 0) edge(tens, '0' + minute / 10, '0' + minute / 10, ones = state(-1));
            const int32_t backs[] = {ends[(minute + 1) % 60], ends[59 - minute], ends[ANY_MINUTE], ends[NO_OFFSET]};
            for (int end = AHEAD; end < TIME_ENDS; end++)
                nfa.calls.add(ones, {first_time + end, backs[end - AHEAD], '0' + minute % 10, byte_before(':', seconds[minute == 59])});
        }
    }
    return start;
}

void Formats::add_time_starts() {
    if (time_start < 0) return;
    nfa.starts.resize(first_time + AHEAD, time_start);
    nfa.starts.resize(first_time + TIME_ENDS, 0); // 0: not used
}

} // namespace stepgraph
