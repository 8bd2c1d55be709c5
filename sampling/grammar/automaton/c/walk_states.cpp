// See walk_states.h.

#include "walk_states.h"

#include <numeric>

namespace stepgraph {

static constexpr int32_t MOST_BYTES = 1 << 15; // stands for an unlimited length

std::vector<WalkState> walk_states_of(const Automaton &automaton) {
    std::vector<WalkState> walk_states((size_t)automaton.states);
    for (size_t state = 0; state < walk_states.size(); state++) walk_states[state].pop = automaton.pop[state];
    std::array<Ints, ByteGroups::OTHERS> classes; // [groups] the byte classes of each group
    for (int byte = 0; byte < 256; byte++)
        if (int group = byte_groups.of[byte]; group < ByteGroups::OTHERS) classes[(size_t)group].push_back(automaton.class_of[byte]);
    std::vector<uint64_t> groups_of((size_t)automaton.classes, 0); // [classes]
    uint64_t every = 0;
    for (size_t group = 0; group < classes.size(); group++) {
        sort_unique(classes[group]);
        for (int32_t c : classes[group]) groups_of[(size_t)c] |= 1ull << group, every |= 1ull << group;
    }
    auto target_of_class = [&](int32_t state, int32_t c) { // DEAD: the text does not remain in the part of the grammar
        int32_t entry = automaton.entry_of(state, c), to = entry < 0 ? DEAD : automaton.target_of(entry);
        return to < 0 || automaton.pop[to] >= 0 || automaton.push_of(entry) >= 0 ? DEAD : to;
    };
    auto target_of_group = [&](int32_t state, size_t group) { // DEAD: not the same target for all bytes
        int32_t found = target_of_class(state, classes[group][0]);
        auto is_same = [&](int32_t c) { return target_of_class(state, c) == found; };
        return found >= 0 && std::all_of(classes[group].begin() + 1, classes[group].end(), is_same) ? found : DEAD;
    };
    Ints words((size_t)automaton.classes + 1, 0); // prefix sums over classes: 1 for those of letters and digits
    for (int word : ByteGroups::WORDS)
        for (int32_t c : classes[(size_t)word]) words[(size_t)c + 1] = 1;
    std::partial_sum(words.begin(), words.end(), words.begin());
    Ints next((size_t)automaton.states, DEAD), path; // next: the target of most letters or digits
    for (int32_t state = 0; state < automaton.states; state++) {
        if (!automaton.sum_of(state, words)) continue;
        int32_t &to = next[(size_t)state];
        for (int word : ByteGroups::WORDS)
            if (to < 0) to = target_of_group(state, (size_t)word);
        if (to < 0) continue;
        uint64_t &groups = walk_states[(size_t)state].groups = every;
        for (int32_t c = 0; c < automaton.classes; c++)
            if (groups_of[(size_t)c] & groups && target_of_class(state, c) != to) groups &= ~groups_of[(size_t)c];
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
    return walk_states;
}

Ints plain_rows(const Automaton &automaton, int32_t longest, std::vector<WalkState> &walk_states) {
    const int32_t states = automaton.states;
    Ints plain_row((size_t)states, 0);
    if (!longest) return plain_row;
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
        int32_t read = automaton.sum_of(state, before);
        if (!read || (read / PLAIN > 0 && read / PLAIN < before.back() / PLAIN)) { // its successors do not matter
            some[state] = read > 0, all[state] = 0;
            continue;
        }
        work.assign(1, {state, 0});
        for (size_t at = 0; at < work.size(); at++) {
            auto [from, inside] = work[at];
            for (auto [c, to_inside] : moves[inside]) {
                int32_t entry = automaton.entry_of(from, c), to = automaton.target_of(entry);
                if (entry < 0 || automaton.push_of(entry) >= 0 || automaton.pop[to] >= 0) {
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
        if (some[state] && all[state] && after[state].size() == 1 && after[state][0] == state) surely[state] = maybe[state] = longest;
        else if (some[state] && all[state]) open.push_back(state);
        else if (some[state]) maybe[state] = longest + 1;
    }
    bool any = true;
    for (int32_t round = 0; any && round < longest; round++) {
        any = false;
        for (size_t at = open.size(); at-- > 0;) { // a state mostly leads to later ones
            int32_t state = open[at], low = longest, high = 0;
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
    return plain_row;
}

} // namespace stepgraph
