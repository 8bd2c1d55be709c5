// See nfa.h. States are created per (expression, continuation), from the end of the grammar on: right recursion becomes a loop, equal ends
// share states. Left-linear rules are built separately. Other recursion must be between literal bytes: such parts become called automata.

#include "characters.h"
#include "formats.h"
#include "grammar_graph.h"

#include <array>
#include <iterator>

namespace stepgraph {

namespace {

constexpr int DEEP = 2500; // the nesting from which rules are built later

class Builder : Formats {
public:
    Builder(const Grammar &grammar, const Limits &limits, std::unordered_set<int64_t> &unrolled, Calls calls)
        : Formats(limits, calls), graph(grammar), unrolled(unrolled), shape_of_expression((size_t)grammar.num_expressions) {}

    Nfa build() {
        choose_called();
        Ints order{-1};
        for (int32_t alternative : called) {
            automaton_of[alternative] = (int32_t)order.size();
            order.push_back(alternative);
        }
        first_time = (int32_t)order.size();
        for (size_t index = 0; index < order.size(); index++) {
            int32_t final = state(-1);
            nfa.states[final].final_of = (int32_t)index;
            int32_t start = index ? expression(order[index], final, true) : rule(graph.grammar.root, final);
            nfa.starts.push_back(start);
            while (!later.empty()) {
                auto [number, continuation] = later.back();
                later.pop_back();
                int32_t known = state_of_key[key_of(number, continuation)];
                follow(known, rule_body(number, continuation));
            }
        }
        add_time_starts();
        nfa.edges.sort(nfa.states.size());
        nfa.next.sort(nfa.states.size());
        nfa.calls.sort(nfa.states.size());
        return std::move(nfa);
    }

private:
    static constexpr int32_t OPEN = -2; // OPEN: being built, without a reference to it so far

    // The index in `state_of_key` of a rule and a continuation, or of choices. NONE: the caller must set the state.
    size_t key_of(Slice<int32_t> key) {
        auto [number, is_new] = keys.add(key.first, key.size());
        if (is_new) state_of_key.push_back(NONE);
        return (size_t)number;
    }
    size_t key_of(int32_t rule, int32_t continuation) {
        const int32_t key[] = {~rule, continuation};
        return key_of({std::begin(key), std::end(key)});
    }

    void choose_called() {
        auto components = graph.recursive_components(called);
        auto each_recursive = [&](const auto &found) { // calls found(alternative, component) for alternatives that recurse in the middle
            for (auto &component : components) {
                if (graph.linearity(component, called)) continue;
                for (int32_t rule : component)
                    graph.each_alternative(graph.grammar.bodies[rule], [&](int32_t alternative) {
                        bool recursive = false;
                        graph.each_reference(alternative, called, [&](int32_t to) { recursive |= component.count(to) > 0; });
                        if (recursive) found(alternative, component);
                    });
            }
        };
        std::set<int32_t> bracketed, parts;
        each_recursive([&](int32_t alternative, auto &) { if (graph.bracket_of(alternative) >= 0) bracketed.insert(alternative); });
        called = bracketed;
        if (!called.empty()) components = graph.recursive_components(called);
        each_recursive([&](int32_t alternative, auto &component) {
            if (int32_t part = graph.split(alternative, component); part >= 0) parts.insert(part);
        });
        called.insert(parts.begin(), parts.end());
        if (!parts.empty()) components = graph.recursive_components(called);
        for (auto &component : components) {
            char kind = graph.linearity(component, called);
            if (!kind) throw Unfit("it has a recursion that is not enclosed in literal text");
            if (kind == 'l')
                for (int32_t rule : component) left_linear[rule] = component;
        }
        if (calls != Calls::BRACKETS && calls != Calls::STRINGS) return;
        std::set<int> brackets{'{'};
        for (int32_t alternative : called) brackets.insert(graph.bracket_of(alternative));
        for (int32_t rule : graph.rules_outside_strings())
            graph.each_alternative(graph.grammar.bodies[rule], [&](int32_t alternative) {
                bool is_string = calls == Calls::STRINGS && graph.is_string(alternative);
                if (is_string || brackets.count(graph.bracket_of(alternative))) called.insert(alternative);
            });
    }

    // Each of the following functions returns the state from which the expression and then the continuation are read.

    // A rule has one state for each continuation. A recursive reference during `rule_body` creates a state that leads to it.
    int32_t rule(int32_t number, int32_t continuation) {
        size_t key = key_of(number, continuation);
        if (int32_t &known = state_of_key[key]; depth > DEEP && known == NONE) {
            later.push_back({number, continuation});
            known = state_before(continuation);
        } else if (known == OPEN) {
            known = state_before(continuation);
        }
        if (state_of_key[key] != NONE) return state_of_key[key];
        state_of_key[key] = OPEN;
        int32_t found = rule_body(number, continuation), &start = state_of_key[key];
        if (start == OPEN) return start = found;
        follow(start, found);
        return start;
    }

    int32_t rule_body(int32_t number, int32_t continuation) {
        auto left = left_linear.find(number);
        if (left != left_linear.end()) return left_rule(number, continuation, left->second);
        if (int32_t kind = graph.grammar.formats[number]; kind > 0) return host_name(kind / 2, kind % 2, continuation);
        else if (kind && graph.grammar.has_times) return time(continuation);
        return expression(graph.grammar.bodies[number], continuation, false);
    }

    // A left-linear component has one state per rule, which means that the rule is complete.
    int32_t left_rule(int32_t number, int32_t continuation, const std::set<int32_t> &component) {
        enter();
        int32_t start = state_before(continuation);
        state_of_key[key_of(number, continuation)] = start;
        std::map<int32_t, int32_t> complete;
        for (int32_t member : component) complete[member] = state_before(continuation);
        follow(complete[number], continuation);
        for (int32_t member : component)
            graph.each_alternative(graph.grammar.bodies[member], [&](int32_t alternative) {
                View at = graph.view(alternative);
                Ints parts = at.kind == SEQUENCE && !called.count(alternative) ? Ints(at.data, at.data + at.size) : Ints{alternative};
                int32_t from = start, to = complete[member];
                size_t first = 0;
                if (!parts.empty()) {
                    View head = graph.view(parts[0]);
                    if (head.kind == RULE && component.count(head.data[0])) {
                        from = complete[head.data[0]];
                        first = 1;
                    }
                }
                for (size_t part = parts.size(); part-- > first;) to = expression(parts[part], to, false);
                follow(from, to);
            });
        depth--;
        return start;
    }

    void enter() {
        if (++depth > MAX_DEPTH) throw Unfit("its rules are nested more than " + std::to_string(MAX_DEPTH) + " deep");
    }

    int32_t expression(int32_t number, int32_t continuation, bool as_automaton) {
        if (!as_automaton && called.count(number)) return call(number, continuation);
        View at = graph.view(number);
        if (at.kind == RULE) return rule(at.data[0], continuation);
        enter();
        int32_t start = build(at, number, continuation);
        depth--;
        return start;
    }

    int32_t build(const View &at, int32_t number, int32_t continuation) {
        int32_t to = continuation, repeated = at.size ? at.data[0] : 0;
        switch (at.kind) {
        case EMPTY: return continuation;
        case BYTES:
            for (int index = at.size; index-- > 0;) to = byte_before(at.data[index] & 255, to);
            return to;
        case CLASS: return characters(state_before(continuation), shape_at(number, at), continuation);
        case CLASS_STAR:
            to = state_before(continuation);
            follow(to, continuation);
            return characters(to, shape_at(number, at), to);
        case SEQUENCE:
            for (int index = at.size; index-- > 0;) to = expression(at.data[index], to, false);
            return to;
        case CHOICES: return choices(at, continuation);
        case REPEAT:
            return repeat([&, repeated](int32_t after) { return rule(repeated, after); }, graph.grammar.shortest[repeated], number,
                at.data[1], at.data[2], continuation);
        case TAGS:
            if (!at.data[at.size - 2] || graph.view(at.data[at.size - 1]).size) throw Unfit("its tags do not repeat or exclude texts");
            return tags(at, continuation);
        default: throw Unfit("it has a regular expression or refers to token ids");
        }
    }

    int32_t choices(const View &at, int32_t continuation) {
        Ints key((size_t)at.size + 2);
        for (int index = 0; index < at.size; index++) key[(size_t)index + 2] = expression(at.data[index], continuation, false);
        key[0] = CHOICES, key[1] = nfa.states[continuation].loop;
        auto found = key.begin() + 2;
        std::sort(found, key.end());
        key.erase(std::unique(found, key.end()), key.end());
        if (key.size() == 3) return key[2];
        int32_t &known = state_of_key[key_of({key.data(), key.data() + key.size()})];
        if (known != NONE) return known;
        known = state_before(continuation);
        for (; found != key.end(); ++found) follow(known, *found);
        return known;
    }

    int32_t call(int32_t alternative, int32_t continuation) {
        int32_t start = state_before(continuation);
        nfa.calls.add(start, {automaton_of[alternative], continuation});
        // Another run of the automaton could use the counter of a loop around the call.
        for (int32_t loop = nfa.states[start].loop; loop >= 0; loop = nfa.loops[loop].parent) unrolled.insert(nfa.loops[loop].expression);
        return start;
    }

    const Shape &shape_at(int32_t expression, const View &view) {
        const Shape *&known = shape_of_expression[(size_t)expression];
        if (known) return *known;
        std::vector<Range> ranges = class_ranges(view.data, view.size);
        auto at = shapes.find(ranges);
        if (at == shapes.end()) at = shapes.emplace(ranges, shape_of(ranges)).first;
        return *(known = &at->second);
    }

    int32_t characters(int32_t start, const Shape &shape, int32_t continuation) { // returns `start`
        numbers.assign((size_t)shape.states, start);
        numbers[1] = continuation;
        for (size_t at = 2; at < numbers.size(); at++) numbers[at] = state_before(continuation);
        for (const Shape::Part &part : shape.parts) edge(numbers[part.from], part.low, part.high, numbers[part.to]);
        return start;
    }

    template <class Body>
    int32_t repeat(const Body &body, int32_t shortest_body, int32_t number, int32_t low, int32_t high, int32_t continuation) {
        int32_t to = continuation;
        if (high < 0) {
            int32_t head = state_before(continuation);
            follow(head, continuation);
            int32_t first = body(head);
            follow(head, first);
            to = head;
        } else {
            to = times(body, shortest_body, (int64_t)number * 2, high - low, true, to);
        }
        return times(body, shortest_body, (int64_t)number * 2 + 1, low, false, to);
    }

    // `count` times the body, or up to `count` times. As many last iterations as a token can go through are unrolled, so that the tokens
    // that are legal inside the counted loop before them do not depend on its counter.
    template <class Body>
    int32_t times(const Body &body, int32_t shortest_body, int64_t key, int64_t count, bool optional, int32_t continuation) {
        int32_t to = continuation;
        int nesting = 0;
        for (int32_t loop = nfa.states[continuation].loop; loop >= 0; loop = nfa.loops[loop].parent) nesting++;
        int64_t in_token = shortest_body ? 1 + (limits.longest_token - 1) / shortest_body : count; // iterations that one token can end
        bool counted = count > in_token + 8 && nesting < MAX_COUNTERS && !unrolled.count(key);
        int64_t written = counted ? in_token : count;
        for (int64_t index = 0; index < written; index++) {
            int32_t first = body(to);
            if (first == to) break; // the body is the empty text
            if (optional) {
                int32_t head = state_before(continuation);
                follow(head, continuation);
                follow(head, first);
                first = head;
            }
            to = first;
        }
        if (!counted) return to;
        int32_t loop = (int32_t)nfa.loops.size(), outer = nfa.states[continuation].loop;
        nfa.loops.push_back({-1, to, (int32_t)(count - written), nesting, outer, key});
        int32_t head = state(loop), again = state(loop), enter = state(outer);
        if (optional) follow(head, continuation);
        int32_t first = body(again);
        follow(head, first);
        nfa.loops[loop].head = head;
        nfa.states[again].kind = Nfa::AGAIN;
        nfa.states[enter].kind = Nfa::ENTER;
        nfa.states[again].target_loop = nfa.states[enter].target_loop = loop;
        return enter;
    }

    // Free text; after each trigger its rule, then free text again. A trigger ends at its first occurrence.
    int32_t tags(const View &at, int32_t continuation) {
        struct Node { std::array<int32_t, 256> next; int32_t rule = -1, fail = 0; };
        std::vector<Node> nodes(1);
        nodes[0].next.fill(-1);
        for (int index = 0; index + 2 < at.size; index += 2) {
            View trigger = graph.view(at.data[index]);
            int32_t node = 0;
            for (int byte = 0; byte < trigger.size; byte++) {
                int32_t value = trigger.data[byte] & 255;
                if (nodes[node].next[value] < 0) {
                    nodes[node].next[value] = (int32_t)nodes.size();
                    nodes.emplace_back();
                    nodes.back().next.fill(-1);
                }
                node = nodes[node].next[value];
            }
            nodes[node].rule = at.data[index + 1];
        }
        Ints order; // breadth first
        for (int32_t &next : nodes[0].next) {
            if (next > 0) order.push_back(next);
            else next = 0;
        }
        for (size_t index = 0; index < order.size(); index++) {
            Node &node = nodes[order[index]];
            const Node &shorter = nodes[node.fail];
            if (node.rule < 0) node.rule = shorter.rule;
            for (int byte = 0; byte < 256; byte++) {
                int32_t &next = node.next[byte];
                if (next < 0) {
                    next = shorter.next[byte];
                    continue;
                }
                nodes[next].fail = shorter.next[byte];
                order.push_back(next);
            }
        }
        Ints states;
        for (size_t index = 0; index < nodes.size(); index++) states.push_back(state_before(continuation));
        for (size_t index = 0; index < nodes.size(); index++) {
            if (nodes[index].rule >= 0) {
                int32_t body = rule(nodes[index].rule, states[0]);
                follow(states[index], body);
                continue;
            }
            follow(states[index], continuation);
            for (int low = 0, high; low < 256; low = high + 1) {
                for (high = low; high < 255 && nodes[index].next[high + 1] == nodes[index].next[low];) high++;
                edge(states[index], low, high, states[nodes[index].next[low]]);
            }
        }
        return states[0];
    }

    GrammarGraph graph;
    std::unordered_set<int64_t> &unrolled;
    Interned keys; // of states, see `key_of`
    Ints state_of_key;
    std::map<std::vector<Range>, Shape> shapes; // by characters
    std::vector<const Shape *> shape_of_expression; // [expressions] of a class, or null
    Ints numbers; // used by `characters`
    std::set<int32_t> called; // expressions with a separate automaton
    std::map<int32_t, int32_t> automaton_of;
    std::map<int32_t, std::set<int32_t>> left_linear; // by rule
    int depth = 0;
    std::vector<std::pair<int32_t, int32_t>> later; // rules that are not built yet, and their continuations
};

} // namespace

Nfa build_nfa(const Grammar &grammar, const Limits &limits, std::unordered_set<int64_t> &unrolled, Calls calls) {
    size_t before = unrolled.size();
    Nfa nfa = Builder(grammar, limits, unrolled, calls).build();
    return unrolled.size() == before ? std::move(nfa) : Nfa();
}

} // namespace stepgraph
