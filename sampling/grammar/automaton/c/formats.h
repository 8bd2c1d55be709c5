// The states of a nondeterministic automaton while it is built, and formats that are built state by state, because rules for as many states
// take long to parse.

#pragma once

#include "nfa.h"

namespace stepgraph {

class Formats {
public:
    Formats(const Limits &limits, Calls calls) : limits(limits), calls(calls) {}

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

    // Each of the following functions returns the state from which a text and then the continuation are read.

    // A byte. There is one state for each byte and continuation.
    int32_t byte_before(int32_t byte, int32_t continuation) {
        for (int32_t known = before[(size_t)continuation].first; known != NONE; known = before[(size_t)known].next)
            if (before[(size_t)known].byte == byte) return known;
        int32_t made = state_before(continuation);
        edge(made, byte, byte, continuation);
        before[(size_t)made].byte = byte;
        before[(size_t)made].next = std::exchange(before[(size_t)continuation].first, made);
        return made;
    }

    // Labels of letters, digits and hyphens, separated by points: up to 63 characters each and `longest` in all. There is a state for each
    // number of characters left in the label and in the name.
    int32_t host_name(int longest, bool without_punycode, int32_t continuation);

    // Second 60 is the last of a day in UTC, so the offset is the time plus a minute, or the rest of the day. The minute is on the stack
    // from its last digit to the colon of the offset, or 12,000 states would be needed. Parts do not end at digits, which tokens may span.
    int32_t time(int32_t continuation);

    void add_time_starts(); // the starts of the automata that times call, after all others

    static constexpr int32_t NONE = -1;
    const Limits &limits;
    const Calls calls;
    Nfa nfa;
    int32_t first_time = 0; // number of the first automaton that times call; set it before the first time

private:
    static constexpr int64_t NFA_STATES_PER_STATE = 6; // two to three are usual; one that takes more would fail later, at a greater cost
    static constexpr size_t FEW_STATES = 40'000; // maximum for an automaton in which rules are copied
    // Automata from `first_time` on, by their end: times before each minute of the offset; from AHEAD on, parts with a minute on the stack.
    enum TimeEnd { ANY_MINUTE = 60, NO_OFFSET, AHEAD, BEHIND, ANY_HOUR, IN_UTC, TIME_ENDS };
    int32_t time_start = -1;
    int host_names = 0;
    struct Before { int32_t byte, first = NONE, next = NONE; }; // first, next: a list of the states that read one byte before a state
    std::vector<Before> before; // [states]
};

} // namespace stepgraph
