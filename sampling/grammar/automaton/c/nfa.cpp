// See nfa.h. States are created per (expression, continuation), from the end of the grammar on: right recursion becomes a loop, equal ends
// share states. Left-linear rules are built separately. Other recursion must be between literal bytes: such parts become called automata.

#include "nfa.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>

namespace stepgraph {

namespace {

// Kinds of expressions in xgrammar's serialised grammar.
enum Expression { BYTES, CLASS, CLASS_STAR, EMPTY, RULE, SEQUENCE, CHOICES, TAGS, REPEAT, TOKEN, EXCLUDE_TOKEN, TOKEN_TAGS, REGEX };

constexpr int64_t NFA_STATES_PER_STATE = 6; // two to three are usual; a grammar that takes more would fail later, at a greater cost
constexpr int MAX_HOST_NAMES = 3; // with more, strings become called automata
constexpr size_t FEW_STATES = 40'000; // maximum for an automaton in which rules are copied
constexpr int MAX_DEPTH = 3000; // nesting of expressions and rules: a level takes about 1,000 bytes of stack
constexpr int DEEP = 2500; // the nesting from which rules are built later
constexpr int32_t LAST_CODE_POINT = 0x10FFFF;

using Range = std::pair<int32_t, int32_t>;
using ByteRanges = std::vector<Range>; // one range for each byte of an encoded character

int encode(int32_t code, uint8_t *bytes) { // also surrogates, as the library does
    if (code < 0x80) return bytes[0] = (uint8_t)code, 1;
    int size = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (int at = size - 1; at > 0; at--, code >>= 6) bytes[at] = (uint8_t)(0x80 | (code & 0x3F));
    bytes[0] = (uint8_t)(lead[size] | code);
    return size;
}

// The encoded characters low..high as sequences of byte ranges.
void byte_ranges(int32_t low, int32_t high, std::vector<ByteRanges> &out) {
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

std::vector<Range> merged(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end());
    std::vector<Range> out;
    for (Range range : ranges) {
        if (!out.empty() && range.first <= out.back().second + 1) out.back().second = std::max(out.back().second, range.second);
        else out.push_back(range);
    }
    return out;
}

// The characters of a class expression: whether it is negated, then the first and last character of each range.
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

// Calls found(begin, end) with the members of each strongly connected component of a graph, given the targets of its nodes. Components come
// after those that they lead to (Tarjan's algorithm).
template <class Found> void each_component(const std::vector<Ints> &targets, const Found &found) {
    Ints order(targets.size(), -1), low(targets.size()), stack;
    std::vector<char> on_stack(targets.size(), 0);
    std::vector<std::pair<int32_t, size_t>> work; // node and the edge to follow
    int32_t time = 0;
    auto open = [&](int32_t node) {
        order[(size_t)node] = low[(size_t)node] = time++;
        on_stack[(size_t)node] = 1;
        stack.push_back(node), work.push_back({node, 0});
    };
    for (size_t start = 0; start < targets.size(); start++) {
        if (order[start] < 0) open((int32_t)start);
        while (!work.empty()) {
            auto &[node, edge] = work.back();
            if (edge < targets[(size_t)node].size()) {
                int32_t to = targets[(size_t)node][edge++];
                if (order[(size_t)to] < 0) open(to);
                else if (on_stack[(size_t)to]) low[(size_t)node] = std::min(low[(size_t)node], order[(size_t)to]);
                continue;
            }
            int32_t done = node, from = low[(size_t)done];
            work.pop_back();
            if (!work.empty()) low[(size_t)work.back().first] = std::min(low[(size_t)work.back().first], from);
            if (from != order[(size_t)done]) continue;
            auto begin = std::find(stack.rbegin(), stack.rend(), done).base() - 1;
            for (auto member = begin; member != stack.end(); ++member) on_stack[(size_t)*member] = 0;
            found(begin, stack.end());
            stack.erase(begin, stack.end());
        }
    }
}

struct View {
    int32_t kind, size;
    const int32_t *data;
};

class GrammarGraph { // which rules refer to which, and how
public:
    explicit GrammarGraph(const Grammar &grammar) : grammar(grammar) {
        reached.insert(grammar.root);
        for (Ints left{grammar.root}; !left.empty();) {
            int32_t rule = left.back();
            left.pop_back();
            each_reference(grammar.bodies[rule], {}, [&](int32_t to) { if (reached.insert(to).second) left.push_back(to); });
        }
    }

    View view(int32_t expression) const {
        auto found = sequences.find(expression);
        if (found != sequences.end()) return {SEQUENCE, (int32_t)found->second.size(), found->second.data()};
        const int32_t *at = grammar.data + grammar.offsets[expression];
        return {at[0], at[1], at + 2};
    }

    // Calls `found(rule)` for each reference in an expression, except in `cut` expressions.
    template <class Found> void each_reference(int32_t expression, const std::set<int32_t> &cut, const Found &found) const {
        if (cut.count(expression)) return;
        View at = view(expression);
        if (at.kind == RULE || at.kind == REPEAT) found(at.data[0]);
        else if (at.kind == SEQUENCE || at.kind == CHOICES)
            for (int index = 0; index < at.size; index++) each_reference(at.data[index], cut, found);
        else if (at.kind == TAGS)
            for (int index = 1; index < at.size - 2; index += 2) found(at.data[index]);
    }

    // Strongly connected components of the rules that the root reaches and that refer to themselves outside of `cut`.
    std::vector<std::set<int32_t>> recursive_components(const std::set<int32_t> &cut) const {
        std::vector<Ints> references(grammar.num_rules);
        for (int rule = 0; rule < grammar.num_rules; rule++)
            each_reference(grammar.bodies[rule], cut, [&](int32_t to) { references[rule].push_back(to); });
        std::vector<std::set<int32_t>> components;
        each_component(references, [&](auto begin, auto end) {
            const Ints &own = references[*begin];
            bool recursive = end - begin > 1 || std::find(own.begin(), own.end(), *begin) != own.end();
            if (recursive && reached.count(*begin)) components.emplace_back(begin, end);
        });
        return components;
    }

    // 'r' if all references inside a component are at the end of their alternatives, 'l' if all are at the start; else 0.
    char linearity(const std::set<int32_t> &component, const std::set<int32_t> &cut) const {
        bool right = true, left = true;
        std::function<void(int32_t, bool, bool)> walk = [&](int32_t expression, bool at_start, bool at_end) {
            if (cut.count(expression)) return;
            View at = view(expression);
            if (at.kind == RULE && component.count(at.data[0])) {
                right &= at_end;
                left &= at_start;
            } else if (at.kind == REPEAT && component.count(at.data[0])) {
                right = left = false;
            } else if (at.kind == CHOICES) {
                for (int index = 0; index < at.size; index++) walk(at.data[index], at_start, at_end);
            } else if (at.kind == SEQUENCE) {
                for (int index = 0; index < at.size; index++)
                    walk(at.data[index], at_start && index == 0, at_end && index == at.size - 1);
            } else if (at.kind == TAGS) {
                each_reference(expression, cut, [&](int32_t rule) { if (component.count(rule)) right = left = false; });
            }
        };
        for (int32_t rule : component) walk(grammar.bodies[rule], true, true);
        return right ? 'r' : left ? 'l' : 0;
    }

    template <class Found> void each_alternative(int32_t expression, const Found &found) const {
        View at = view(expression);
        if (at.kind != CHOICES) return found(expression);
        for (int index = 0; index < at.size; index++) each_alternative(at.data[index], found);
    }

    // The first byte of an alternative that begins and ends with different literal bytes; else -1.
    int bracket_of(int32_t alternative) const {
        View at = view(alternative), first = at, last = at;
        if (at.kind == SEQUENCE && at.size) first = view(at.data[0]), last = view(at.data[at.size - 1]);
        if (first.kind != BYTES || last.kind != BYTES || !first.size || !last.size) return -1;
        return first.data != last.data || first.size > 1 ? first.data[0] & 255 : -1;
    }

    // Whether an alternative is a JSON string: a quote and a rule with the final quote, or a quote, parts without a quote, and a quote.
    bool is_string(int32_t alternative) const {
        View at = view(alternative);
        if (at.kind != SEQUENCE || at.size < 2) return false;
        int quotes = 0;
        bool first = false, last = false;
        for (int index = 0; index < at.size; index++) {
            View part = view(at.data[index]);
            last = part.kind == BYTES && part.size == 1 && part.data[0] == '"';
            quotes += last;
            first |= last && index == 0;
        }
        return first && (at.size == 2 ? quotes == 1 && view(at.data[1]).kind == RULE : quotes == 2 && last);
    }

    // Moves the part of an alternative that begins and ends with literal bytes and refers to the component in between into a separate
    // sequence. The rest of the alternative may recurse at its start or at its end. Returns the sequence, or -1.
    int32_t split(int32_t alternative, const std::set<int32_t> &component) {
        View at = view(alternative);
        if (at.kind != SEQUENCE) return -1;
        int first = -1, last = -1; // indices of the two literals
        bool inside = false; // whether a reference was found after `first`
        for (int index = 0; index < at.size; index++) {
            bool is_bytes = view(at.data[index]).kind == BYTES;
            if (is_bytes && inside) last = index;
            else if (is_bytes) first = index;
            each_reference(at.data[index], {}, [&](int32_t to) { inside |= first >= 0 && component.count(to) > 0; });
        }
        if (last < 0) return -1;
        Ints parts(at.data, at.data + at.size), part(at.data + first, at.data + last + 1);
        int32_t made = grammar.num_expressions + (int32_t)sequences.size();
        parts.erase(parts.begin() + first + 1, parts.begin() + last + 1);
        parts[first] = made;
        sequences[made] = part;
        sequences[alternative] = parts;
        return made;
    }

    // The rules that the root reaches where no JSON string is open: a bracket inside a string, as in the format of a URI, opens no value.
    std::set<int32_t> rules_outside_strings() const {
        enum Place { OUTSIDE, INSIDE, ESCAPED };
        std::set<int32_t> outside;
        std::map<std::pair<int32_t, Place>, std::optional<Place>> ends; // (rule, start) -> end; unknown while the rule is walked
        int depth = 0;
        std::function<std::pair<Place, bool>(int32_t, Place)> walk; // where an expression ends, and whether that is known
        auto walk_rule = [&](int32_t rule, Place place) -> std::pair<Place, bool> {
            auto [found, is_new] = ends.try_emplace({rule, place});
            if (!is_new || depth > MAX_DEPTH) return {found->second.value_or(place), found->second.has_value()};
            if (place == OUTSIDE) outside.insert(rule);
            depth++;
            auto end = walk(grammar.bodies[rule], place);
            depth--;
            ends[{rule, place}] = end.first;
            return end;
        };
        walk = [&](int32_t expression, Place place) -> std::pair<Place, bool> {
            View at = view(expression);
            std::pair<Place, bool> end{place, true};
            switch (at.kind) {
            case BYTES:
                for (int index = 0; index < at.size; index++) {
                    Place &now = end.first;
                    if (now == ESCAPED) now = INSIDE;
                    else if (at.data[index] == '"') now = now == INSIDE ? OUTSIDE : INSIDE;
                    else if (at.data[index] == '\\' && now == INSIDE) now = ESCAPED;
                }
                break;
            case CLASS: end.first = place == ESCAPED ? INSIDE : place; break;
            case RULE:
            case REPEAT: return walk_rule(at.data[0], place);
            case SEQUENCE:
                for (int index = 0; index < at.size; index++) {
                    auto next = walk(at.data[index], end.first);
                    end = {next.first, end.second && next.second};
                }
                break;
            case CHOICES:
                end.second = false;
                for (int index = 0; index < at.size; index++)
                    if (auto one = walk(at.data[index], place); one.second && !end.second) end = one;
                break;
            case TAGS: each_reference(expression, {}, [&](int32_t rule) { walk_rule(rule, OUTSIDE); }); break;
            default: break;
            }
            return end;
        };
        walk_rule(grammar.root, OUTSIDE);
        return outside;
    }

    const Grammar &grammar;

private:
    std::map<int32_t, Ints> sequences; // added or changed by `split`
    std::set<int32_t> reached; // rules reached from the root
};

class Builder {
public:
    Builder(const Grammar &grammar, const Limits &limits, std::unordered_set<int64_t> &unrolled, Calls calls)
        : graph(grammar), limits(limits), unrolled(unrolled), calls(calls),
          shape_of_expression((size_t)grammar.num_expressions) {}

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
        if (time_start >= 0) nfa.starts.resize(first_time + AHEAD, time_start), nfa.starts.resize(first_time + TIME_ENDS, 0); // 0: not used
        nfa.edges.sort(nfa.states.size());
        nfa.next.sort(nfa.states.size());
        nfa.calls.sort(nfa.states.size());
        return std::move(nfa);
    }

private:
    int32_t state(int32_t loop) {
        if ((int64_t)nfa.states.size() / NFA_STATES_PER_STATE >= limits.states) exceeded("states", limits.states);
        if (calls == Calls::FEW && nfa.states.size() >= FEW_STATES) throw ManyCopies("its rules are used in many places");
        nfa.states.emplace_back();
        nfa.states.back().loop = loop;
        before.emplace_back();
        return (int32_t)nfa.states.size() - 1;
    }
    int32_t state_before(int32_t continuation) { return state(nfa.states[continuation].loop); }
    void follow(int32_t from, int32_t to) { nfa.next.add(from, to); }
    void edge(int32_t from, int low, int high, int32_t to) { nfa.edges.add(from, {low, high, to}); }

    static constexpr int32_t NONE = -1, OPEN = -2; // OPEN: being built, without a reference to it so far

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
        auto each_recursive = [&](const auto &found) { // calls found(alternative, component) for alternatives that recurse in the middle
            for (auto &component : graph.recursive_components(called)) {
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
        each_recursive([&](int32_t alternative, auto &component) {
            if (int32_t part = graph.split(alternative, component); part >= 0) parts.insert(part);
        });
        called.insert(parts.begin(), parts.end());
        for (auto &component : graph.recursive_components(called)) {
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

    // Labels of letters, digits and hyphens, separated by points: up to 63 characters each and `longest` in all. There is a state for each
    // number of characters left in the label and in the name. Built here, because rules for 24,550 states take a second to parse.
    int32_t host_name(int longest, bool without_punycode, int32_t continuation) {
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

    // Second 60 is the last of a day in UTC, so the offset is the time plus a minute, or the rest of the day. The minute is on the stack
    // from its last digit to the colon of the offset, or 12,000 states would be needed. Parts do not end at digits, which tokens may span.
    int32_t time(int32_t continuation) {
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
        case CLASS: return characters(state_before(continuation), shape_of(number, at), continuation);
        case CLASS_STAR:
            to = state_before(continuation);
            follow(to, continuation);
            return characters(to, shape_of(number, at), to);
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

    // The state that reads one byte and then continues. There is one for each byte and continuation.
    int32_t byte_before(int32_t byte, int32_t continuation) {
        for (int32_t known = before[(size_t)continuation].first; known != NONE; known = before[(size_t)known].next)
            if (before[(size_t)known].byte == byte) return known;
        int32_t made = state_before(continuation);
        edge(made, byte, byte, continuation);
        before[(size_t)made].byte = byte;
        before[(size_t)made].next = std::exchange(before[(size_t)continuation].first, made);
        return made;
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

    // Edges for one character: from state 0 to state 1 through states of its encoded bytes. Equal ends share their states.
    struct Shape {
        struct Part { int32_t from, low, high, to; };
        std::vector<Part> parts;
        int32_t states = 2;
    };

    const Shape &shape_of(int32_t expression, const View &view) {
        const Shape *&known = shape_of_expression[(size_t)expression];
        if (known) return *known;
        auto [at, is_new] = shapes.emplace(class_ranges(view.data, view.size), Shape());
        Shape &shape = at->second;
        known = &shape;
        if (!is_new) return shape;
        std::vector<ByteRanges> sequences;
        for (Range range : at->first) byte_ranges(range.first, range.second, sequences);
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
    const Limits &limits;
    std::unordered_set<int64_t> &unrolled;
    const Calls calls;
    Nfa nfa;
    struct Before { int32_t byte, first = NONE, next = NONE; }; // first, next: a list of the states that read one byte before a state
    std::vector<Before> before; // [states]
    Interned keys; // of states, see `key_of`
    Ints state_of_key;
    std::map<std::vector<Range>, Shape> shapes; // by characters
    std::vector<const Shape *> shape_of_expression; // [expressions] of a class, or null
    Ints numbers; // used by `characters`
    std::set<int32_t> called; // expressions with a separate automaton
    std::map<int32_t, int32_t> automaton_of;
    std::map<int32_t, std::set<int32_t>> left_linear; // by rule
    // Automata from `first_time` on, by their end: times before each minute of the offset; from AHEAD on, parts with a minute on the stack.
    enum TimeEnd { ANY_MINUTE = 60, NO_OFFSET, AHEAD, BEHIND, ANY_HOUR, IN_UTC, TIME_ENDS };
    int32_t first_time = 0, time_start = -1;
    int depth = 0, host_names = 0;
    std::vector<std::pair<int32_t, int32_t>> later; // rules that are not built yet, and their continuations
};

} // namespace

Nfa build_nfa(const Grammar &grammar, const Limits &limits, std::unordered_set<int64_t> &unrolled, Calls calls) {
    size_t before = unrolled.size();
    Nfa nfa = Builder(grammar, limits, unrolled, calls).build();
    return unrolled.size() == before ? std::move(nfa) : Nfa();
}

} // namespace stepgraph
