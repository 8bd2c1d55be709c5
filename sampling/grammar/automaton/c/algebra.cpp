// Operations on automata without stack and counters. See automaton.h.

#include "automaton.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace stepgraph {

static void require_plain(const Automaton &automaton) {
    if (automaton.symbols || !automaton.moves.empty()) throw Unfit("it needs a stack or a counter");
}

Automaton combine(const Automaton &left, const Automaton &right, Operation operation, const Limits &limits) {
    require_plain(left);
    require_plain(right);
    Automaton product;
    std::map<std::pair<uint8_t, uint8_t>, int32_t> class_index;
    std::vector<std::pair<uint8_t, uint8_t>> pairs;
    for (int byte = 0; byte < 256; byte++) {
        std::pair<uint8_t, uint8_t> key{left.class_of[byte], right.class_of[byte]};
        auto [at, is_new] = class_index.emplace(key, (int32_t)pairs.size());
        if (is_new) pairs.push_back(key);
        product.class_of[byte] = (uint8_t)at->second;
    }
    product.classes = (int32_t)pairs.size();
    std::unordered_map<int64_t, int32_t> index;
    std::vector<std::pair<int32_t, int32_t>> states;
    auto intern = [&](int32_t a, int32_t b) -> int32_t {
        bool is_dead = operation == Operation::AND ? a < 0 || b < 0 : operation == Operation::MINUS ? a < 0 : a < 0 && b < 0;
        if (is_dead) return DEAD;
        auto [at, is_new] = index.emplace((int64_t)a << 32 | (uint32_t)b, (int32_t)states.size());
        if (is_new) {
            if ((int64_t)states.size() >= limits.states) exceeded("states", limits.states);
            states.push_back({a, b});
        }
        return at->second;
    };
    auto next_of = [](const Automaton &automaton, int32_t state, uint8_t c) {
        return state < 0 ? DEAD : automaton.next[(size_t)state * automaton.classes + c];
    };
    product.start = intern(left.start, right.start);
    for (size_t done = 0; done < states.size(); done++) {
        auto [a, b] = states[done];
        bool in_left = a >= 0 && left.accepts[a], in_right = b >= 0 && right.accepts[b];
        bool accepts = operation == Operation::AND ? in_left && in_right : operation == Operation::OR ? in_left || in_right : in_left && !in_right;
        product.accepts.push_back(accepts);
        for (auto &[c, d] : pairs) {
            int32_t to = intern(next_of(left, a, c), next_of(right, b, d));
            product.next.push_back(to);
        }
    }
    product.states = (int32_t)states.size();
    // States from which no text is accepted are dead.
    std::vector<Ints> before(states.size());
    for (size_t at = 0; at < product.next.size(); at++)
        if (product.next[at] >= 0) before[product.next[at]].push_back((int32_t)(at / pairs.size()));
    std::vector<char> live(product.accepts.begin(), product.accepts.end());
    Ints stack;
    for (size_t state = 0; state < states.size(); state++)
        if (live[state]) stack.push_back((int32_t)state);
    while (!stack.empty()) {
        int32_t state = stack.back();
        stack.pop_back();
        for (int32_t from : before[state])
            if (!live[from]) live[from] = 1, stack.push_back(from);
    }
    for (int32_t &to : product.next)
        if (to >= 0 && !live[to]) to = DEAD;
    product.pop.assign(states.size(), -1);
    return minimise(std::move(product));
}

bool shortest_text(const Automaton &automaton, std::string &text) {
    require_plain(automaton);
    Ints from(automaton.states, -1), byte(automaton.states), queue{automaton.start};
    from[automaton.start] = automaton.start;
    for (size_t at = 0; at < queue.size(); at++) {
        int32_t state = queue[at];
        if (automaton.accepts[state]) {
            text.clear();
            for (; state != automaton.start; state = from[state]) text += (char)byte[state];
            std::reverse(text.begin(), text.end());
            return true;
        }
        for (int value = 0; value < 256; value++) {
            int32_t to = automaton.next[(size_t)state * automaton.classes + automaton.class_of[value]];
            if (to < 0 || from[to] >= 0) continue;
            from[to] = state;
            byte[to] = value;
            queue.push_back(to);
        }
    }
    return false;
}

} // namespace stepgraph
