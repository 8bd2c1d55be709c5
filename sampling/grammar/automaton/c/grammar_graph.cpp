// See grammar_graph.h.

#include "grammar_graph.h"

#include <functional>
#include <optional>

namespace stepgraph {

// Calls found(begin, end) with the members of each strongly connected component of a graph, given the targets of its nodes. Components come
// after those that they lead to (Tarjan's algorithm).
template <class Found> static void each_component(const std::vector<Ints> &targets, const Found &found) {
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

GrammarGraph::GrammarGraph(const Grammar &grammar) : grammar(grammar) {
    reached.insert(grammar.root);
    for (Ints left{grammar.root}; !left.empty();) {
        int32_t rule = left.back();
        left.pop_back();
        each_reference(grammar.bodies[rule], {}, [&](int32_t to) { if (reached.insert(to).second) left.push_back(to); });
    }
}

std::vector<std::set<int32_t>> GrammarGraph::recursive_components(const std::set<int32_t> &cut) const {
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

char GrammarGraph::linearity(const std::set<int32_t> &component, const std::set<int32_t> &cut) const {
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

int GrammarGraph::bracket_of(int32_t alternative) const {
    View at = view(alternative), first = at, last = at;
    if (at.kind == SEQUENCE && at.size) first = view(at.data[0]), last = view(at.data[at.size - 1]);
    if (first.kind != BYTES || last.kind != BYTES || !first.size || !last.size) return -1;
    return first.data != last.data || first.size > 1 ? first.data[0] & 255 : -1;
}

bool GrammarGraph::is_string(int32_t alternative) const {
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

int32_t GrammarGraph::split(int32_t alternative, const std::set<int32_t> &component) {
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

std::set<int32_t> GrammarGraph::rules_outside_strings() const {
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

} // namespace stepgraph
