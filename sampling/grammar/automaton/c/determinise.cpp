// The subset construction. See automaton.h.

#include "automaton.h"

#include <algorithm>
#include <deque>
#include <map>

namespace stepgraph {

namespace {

constexpr int32_t NOT_FOUND = -2;
constexpr int64_t STEPS_PER_MEMBER = 16; // cost of a member of a set: sorting sets takes longer than following bytes of tokens

// Reached from a set of states without reading a byte: states that read, call or end; and loops to enter or to run again.
struct Reached {
    Ints members, enters, agains;
    void add(const Reached &other) {
        members.insert(members.end(), other.members.begin(), other.members.end());
        enters.insert(enters.end(), other.enters.begin(), other.enters.end());
        agains.insert(agains.end(), other.agains.begin(), other.agains.end());
    }
    void sort() { sort_unique(members), sort_unique(enters), sort_unique(agains); }
};

class Determiniser {
public:
    Determiniser(const Nfa &nfa, const Limits &limits)
        : nfa(nfa), limits(limits), closure_of_state(nfa.states.size(), -1), stamps(nfa.states.size(), 0),
          entries(nfa.states.size(), NOT_FOUND), symbols_of(nfa.starts.size()) {}

    Automaton run() {
        automaton.spans.reserve(nfa.states.size());
        find_live();
        split_classes();
        if (!live[nfa.starts[0]]) throw Unfit("no text satisfies it");
        Move start;
        resolve(closure(nfa.starts[0]), start.target, start.sets);
        automaton.start = start.target;
        for (size_t index = 0; index < start.sets.size() && start.sets[index] >= 0; index += 2)
            automaton.counters[start.sets[index]] = start.sets[index + 1];
        for (size_t called = 0; called < nfa.starts.size(); called++)
            called_starts.push_back(called && live[nfa.starts[called]] ? closure(nfa.starts[called]).members : Ints());
        for (size_t done = 0;; done++) {
            if (done == (size_t)sets.size() && !add_returns()) break;
            expand((int32_t)done);
        }
        automaton.states = sets.size();
        automaton.symbols = symbols.size();
        automaton.finish_sets = finish_sets.size();
        automaton.go.assign((size_t)automaton.finish_sets * automaton.symbols, DEAD);
        for (auto &[pair, state] : returns) automaton.go[(size_t)pair.first * automaton.symbols + pair.second] = state;
        return std::move(automaton);
    }

private:
    [[noreturn]] void uncountable(int32_t loop) { throw Uncountable{nfa.loops[loop].expression}; }

    // States from which the end of their automaton can be reached.
    void find_live() {
        size_t count = nfa.states.size();
        ByState<int32_t> before; // predecessors of each state
        ByState<std::pair<int32_t, int32_t>> calls_before; // (caller, automaton) by the state after the call
        live.assign(count, 0);
        Ints stack;
        for (size_t index = 0; index < count; index++) {
            const Nfa::State &state = nfa.states[index];
            for (const Nfa::Edge &edge : nfa.edges.of((int32_t)index)) before.add(edge.to, (int32_t)index);
            for (int32_t to : nfa.next.of((int32_t)index)) before.add(to, (int32_t)index);
            for (const Nfa::Call &call : nfa.calls.of((int32_t)index)) calls_before.add(call.back, {(int32_t)index, call.automaton});
            if (state.kind != Nfa::PLAIN) before.add(nfa.loops[state.target_loop].head, (int32_t)index);
            if (state.kind == Nfa::AGAIN) before.add(nfa.loops[state.target_loop].exit, (int32_t)index);
            if (state.final_of >= 0) stack.push_back((int32_t)index), live[index] = 1;
        }
        before.sort(count);
        calls_before.sort(count);
        std::vector<char> productive(nfa.starts.size(), 0);
        std::vector<Ints> waiting(nfa.starts.size());
        auto mark = [&](int32_t state) { if (!live[state]) live[state] = 1, stack.push_back(state); };
        while (!stack.empty()) {
            int32_t state = stack.back();
            stack.pop_back();
            for (int32_t from : before.of(state)) mark(from);
            for (auto &[caller, called] : calls_before.of(state)) {
                if (productive[called]) mark(caller);
                else waiting[called].push_back(caller);
            }
            if (!stack.empty()) continue;
            for (size_t called = 0; called < nfa.starts.size(); called++) {
                if (productive[called] || !live[nfa.starts[called]]) continue;
                productive[called] = 1;
                for (int32_t caller : waiting[called]) mark(caller);
            }
        }
    }

    void split_classes() {
        std::array<bool, 257> cut{};
        for (size_t index = 0; index < nfa.states.size(); index++)
            if (live[index])
                for (const Nfa::Edge &edge : nfa.edges.of((int32_t)index)) cut[edge.low] = cut[edge.high + 1] = true;
        for (int byte = 1; byte < 256; byte++) automaton.class_of[byte] = (uint8_t)(automaton.class_of[byte - 1] + cut[byte]);
        automaton.classes = automaton.class_of[255] + 1;
    }

    const Reached &closure(int32_t start) {
        int32_t &known = closure_of_state[(size_t)start];
        if (known >= 0) return closures[(size_t)known];
        known = (int32_t)closures.size();
        Reached &found = closures.emplace_back();
        stack.assign(1, start);
        stamps[start] = ++stamp;
        while (!stack.empty()) {
            int32_t index = stack.back();
            const Nfa::State &state = nfa.states[index];
            stack.pop_back();
            spend(1);
            if (!live[index]) continue;
            if (state.kind == Nfa::ENTER) found.enters.push_back(state.target_loop);
            if (state.kind == Nfa::AGAIN) found.agains.push_back(state.target_loop);
            if (!nfa.edges.of(index).empty() || !nfa.calls.of(index).empty() || state.final_of >= 0) found.members.push_back(index);
            for (int32_t to : nfa.next.of(index))
                if (stamps[to] != stamp) stamps[to] = stamp, stack.push_back(to);
        }
        found.sort();
        store(found.members.size());
        return found;
    }

    bool is_alone(int32_t state) const { // the state is its own closure, as for most states
        bool reads = !nfa.edges.of(state).empty() || !nfa.calls.of(state).empty() || nfa.states[(size_t)state].final_of >= 0;
        return reads && live[(size_t)state] && nfa.states[(size_t)state].kind == Nfa::PLAIN && nfa.next.of(state).empty();
    }

    Reached &closure_of(const Ints &states) { // valid until the next call
        combined.members.clear(), combined.enters.clear(), combined.agains.clear();
        for (int32_t state : states) {
            if (is_alone(state)) combined.members.push_back(state);
            else combined.add(closure(state));
        }
        spend((int64_t)combined.members.size());
        combined.sort();
        return combined;
    }

    void spend(int64_t members) {
        if ((steps += members * STEPS_PER_MEMBER) > limits.steps) exceeded("steps", limits.steps);
    }

    void store(size_t members) {
        if ((stored += (int64_t)(members * sizeof(int32_t))) > limits.bytes) exceeded("bytes", limits.bytes);
    }

    int32_t intern(const int32_t *members, size_t size) {
        auto [number, is_new] = sets.add(members, size);
        if (is_new && number >= limits.states) exceeded("states", limits.states);
        if (is_new) store(size);
        return number;
    }
    int32_t intern(const Ints &members) { return members.empty() ? DEAD : intern(members.data(), members.size()); }

    // Finds the state of a set after entering the loops in `enters`, and the counters that this sets.
    void resolve(const Reached &base, int32_t &state, Sets &sets) {
        if (base.enters.empty()) return void(state = intern(base.members));
        Reached all = base;
        Ints wait = base.enters, entered;
        size_t used = 0; // number of used items of `sets`
        while (!wait.empty()) {
            int32_t loop = wait.back(), counter = nfa.loops[loop].counter, count = nfa.loops[loop].count;
            wait.pop_back();
            if (std::count(entered.begin(), entered.end(), loop)) continue;
            if (uses_counter(base, counter)) uncountable(loop);
            size_t at = 0;
            while (at < used && sets[at] != counter) at += 2;
            if (at == sets.size() || (at < used && sets[at + 1] != count)) uncountable(loop);
            sets[at] = counter;
            sets[at + 1] = count;
            used = std::max(used, at + 2);
            entered.push_back(loop);
            const Reached &head = closure(nfa.loops[loop].head);
            if (!head.agains.empty()) uncountable(head.agains[0]);
            all.add(head);
            wait.insert(wait.end(), head.enters.begin(), head.enters.end());
        }
        sort_unique(all.members);
        if (used == 4 && sets[0] > sets[2]) { // a canonical order, so that equal moves compare equal
            std::swap(sets[0], sets[2]);
            std::swap(sets[1], sets[3]);
        }
        state = intern(all.members);
    }

    // Whether one of the states is inside a loop with this counter. Loops that are entered with the same byte and count share a counter, as
    // long as all loops that a text is inside of begin their next iterations with the same bytes.
    bool uses_counter(const Reached &reached, int32_t counter) const {
        Ints inside;
        for (int32_t member : reached.members) inside.push_back(nfa.states[member].loop);
        for (int32_t entered : reached.enters) inside.push_back(nfa.loops[entered].parent);
        for (int32_t loop : inside)
            for (; loop >= 0; loop = nfa.loops[loop].parent)
                if (nfa.loops[loop].counter == counter) return true;
        return false;
    }

    // The move to the states in `base`, of which one may be the end of a loop's body.
    void move_to(Reached &base, Move &move) {
        if (base.agains.empty()) return resolve(base, move.target, move.sets);
        Ints agains;
        agains.swap(base.agains);
        int32_t counter = nfa.loops[agains[0]].counter;
        for (int32_t loop : agains)
            if (nfa.loops[loop].counter != counter || std::count(base.enters.begin(), base.enters.end(), loop)) uncountable(loop);
        if (uses_counter(base, counter)) uncountable(agains[0]);
        auto join = [&](int32_t Nfa::Loop::*state, int32_t &target, Sets &sets) {
            Reached all = base;
            for (int32_t loop : agains) {
                const Reached &added = closure(nfa.loops[loop].*state);
                if (!added.agains.empty()) uncountable(loop);
                all.add(added);
            }
            all.sort();
            resolve(all, target, sets);
        };
        move.counter = counter;
        join(&Nfa::Loop::head, move.target, move.sets);
        join(&Nfa::Loop::exit, move.last_target, move.last_sets);
    }

    int32_t entry_of(const Move &move) {
        bool is_plain = move.push < 0 && move.counter < 0 && move.sets[0] < 0;
        if (is_plain) return move.target;
        auto [number, is_new] = move_index.add(move.ints(), Move::INTS);
        if (is_new) automaton.moves.push_back(move);
        return SPECIAL + number;
    }

    int32_t entry_to(int32_t target) {
        int32_t &entry = entries[(size_t)target];
        if (entry != NOT_FOUND) return entry;
        if (is_alone(target)) {
            spend(1);
            return entry = intern(&target, 1);
        }
        const Reached &reached = closure(target);
        spend((int64_t)reached.members.size());
        return entry = reached.enters.empty() && reached.agains.empty() ? intern(reached.members) : entry_to(Ints{target});
    }

    int32_t entry_to(const Ints &targets) {
        Move move;
        move_to(closure_of(targets), move);
        return entry_of(move);
    }

    void expand(int32_t number) {
        members.assign(sets.of(number).begin(), sets.of(number).end());
        bool accepts = false, continues = false, has_calls = false;
        Ints finished;
        ranges.clear();
        for (int32_t member : members) {
            const Nfa::State &state = nfa.states[member];
            if (state.final_of == 0) accepts = true;
            if (state.final_of > 0) finished.push_back(state.final_of);
            has_calls |= !nfa.calls.of(member).empty();
            continues |= !nfa.edges.of(member).empty();
            for (const Nfa::Edge &edge : nfa.edges.of(member))
                if (live[edge.to]) ranges.push_back({automaton.class_of[edge.low], automaton.class_of[edge.high], edge.to});
        }
        automaton.accepts.push_back(accepts);
        automaton.pop.push_back(-1);
        if (!finished.empty()) {
            if (continues || has_calls || accepts) throw Nondeterministic("it may end a nested part or continue it, after the same text");
            sort_unique(finished);
            automaton.pop.back() = finish_sets.add(finished).number;
        }
        if (((int64_t)number + 1) * automaton.classes > limits.bytes) exceeded("bytes", limits.bytes); // of 4: minimising reduces the size
        if (has_calls) expand_calls();
        else expand_ranges();
        automaton.end_state();
    }

    void add_entry(int32_t low, int32_t end, int32_t entry) {
        if (entry != DEAD) automaton.add_span({low, end, entry});
    }

    void expand_ranges() {
        if (ranges.size() == 1) return add_entry(ranges[0].low, ranges[0].high + 1, entry_to(ranges[0].to));
        // Finds the targets of each class: `active` has the ranges that include the classes from `low` to before `past`.
        std::sort(ranges.begin(), ranges.end(), [](const Nfa::Edge &left, const Nfa::Edge &right) { return left.low < right.low; });
        active.clear();
        for (size_t added = 0; added < ranges.size() || !active.empty();) {
            int32_t low = active.empty() ? ranges[added].low : past;
            while (added < ranges.size() && ranges[added].low == low) active.push_back(ranges[added++]);
            past = added < ranges.size() ? ranges[added].low : automaton.classes;
            targets.clear();
            for (const Nfa::Edge &range : active) past = std::min(past, range.high + 1), targets.push_back(range.to);
            add_entry(low, past, targets.size() == 1 ? entry_to(targets[0]) : entry_to(targets));
            active.erase(std::remove_if(active.begin(), active.end(), [&](const Nfa::Edge &range) { return range.high < past; }),
                active.end());
        }
    }

    void expand_calls() {
        std::array<bool, 256> reads{}; // by class; automata of times read few classes
        for (int32_t member : members)
            for (const Nfa::Call &call : nfa.calls.of(member))
                if (call.byte < 0 || !ranges.empty()) reads.fill(true);
                else reads[automaton.class_of[(size_t)call.byte]] = true;
        for (int32_t at = 0; at < automaton.classes; at++) {
            if (!reads[(size_t)at]) continue;
            targets.clear();
            for (const Nfa::Edge &range : ranges)
                if (range.low <= at && at <= range.high) targets.push_back(range.to);
            Move move;
            Ints inside = call_targets(at, move.push);
            if (inside.empty() && targets.empty()) continue;
            if (!inside.empty() && !targets.empty()) throw Nondeterministic("it may begin a nested part or continue, with the same text");
            move_to(closure_of(inside.empty() ? targets : inside), move);
            add_entry(at, at + 1, entry_of(move));
        }
    }

    // The states inside called automata after a byte of this class; sets `push` to the symbol for the states after the calls.
    Ints call_targets(int byte_class, int32_t &push) {
        Ints inside, symbol;
        std::vector<std::pair<int32_t, int32_t>> calls; // automaton, state after it
        auto add = [&](const Nfa::Call &call, int32_t low, int32_t high, int32_t to) {
            if (automaton.class_of[low] > byte_class || byte_class > automaton.class_of[high] || !live[call.back] || !live[to]) return;
            inside.push_back(to);
            calls.push_back({call.automaton, call.back});
        };
        for (int32_t caller : members)
            for (const Nfa::Call &call : nfa.calls.of(caller)) {
                if (call.byte >= 0) add(call, call.byte, call.byte, call.to);
                else for (int32_t member : called_starts[call.automaton]) {
                    if (!nfa.calls.of(member).empty()) throw Nondeterministic("a nested part begins with another nested part");
                    if (nfa.states[member].final_of >= 0) throw Nondeterministic("a nested part may be empty");
                    for (const Nfa::Edge &edge : nfa.edges.of(member)) add(call, edge.low, edge.high, edge.to);
                }
            }
        sort_unique(calls);
        for (auto &[called, back] : calls) {
            const Reached &after = closure(back);
            if (!after.enters.empty()) uncountable(after.enters[0]);
            if (!after.agains.empty()) uncountable(after.agains[0]);
            symbol.push_back(-1 - called);
            symbol.insert(symbol.end(), after.members.begin(), after.members.end());
        }
        if (inside.empty()) return inside;
        sort_unique(inside);
        push = symbols.add(symbol).number;
        return inside;
    }

    // Adds the states after each pair of a finish set and a symbol. Returns whether there are new states.
    bool add_returns() {
        int32_t before = sets.size();
        for (int32_t symbol = symbols_done; symbol < symbols.size(); symbol++)
            for (int32_t value : symbols.of(symbol))
                if (value < 0)
                    if (Ints &of = symbols_of[(size_t)(-1 - value)]; of.empty() || of.back() != symbol) of.push_back(symbol);
        for (int32_t finish = 0; finish < finish_sets.size(); finish++)
            for (int32_t symbol : symbols_of[(size_t)*finish_sets.of(finish).begin()]) {
                if (finish < finish_done && symbol < symbols_done) continue;
                Ints members;
                bool all = true;
                for (int32_t called : finish_sets.of(finish)) {
                    bool found = false, is_after = false;
                    for (int32_t value : symbols.of(symbol)) {
                        if (value < 0) found |= is_after = value == -1 - called;
                        else if (is_after) members.push_back(value);
                    }
                    all &= found;
                }
                if (!all) continue; // calls with this symbol cannot end with this finish set
                sort_unique(members);
                int32_t state = intern(members);
                if (state >= 0) returns[{finish, symbol}] = state;
            }
        finish_done = finish_sets.size();
        symbols_done = symbols.size();
        return sets.size() > before;
    }

    const Nfa &nfa;
    const Limits &limits;
    Automaton automaton;
    std::vector<char> live;
    std::deque<Reached> closures; // a call of `closure` leaves the results of others in place
    Ints closure_of_state; // [states] index in `closures`, or -1
    Ints stamps, entries; // entries: [states] the entry of `next` for an edge to the state
    int64_t steps = 0, stored = 0; // stored: in bytes
    int32_t stamp = 0;
    Interned sets, finish_sets, move_index;
    Interned symbols; // for each called automaton: -1 minus its number, then the members after the call
    Reached combined; // result of `closure_of`
    Ints stack; // used by `closure`
    Ints members, targets; // members, targets, ranges, active: of the state that is being expanded
    std::vector<Nfa::Edge> ranges, active; // ranges of byte classes
    int32_t past = 0;
    std::vector<Ints> called_starts;
    std::vector<Ints> symbols_of; // [automata] the symbols with calls of each
    std::map<std::pair<int32_t, int32_t>, int32_t> returns;
    int32_t finish_done = 0, symbols_done = 0;
};

} // namespace

Automaton determinise(const Nfa &nfa, const Limits &limits) { return Determiniser(nfa, limits).run(); }

} // namespace stepgraph
