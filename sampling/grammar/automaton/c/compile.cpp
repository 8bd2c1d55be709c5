// The C interface of the compiler.

#include "masks.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

using namespace stepgraph;

namespace {

enum Outcome { DONE, UNFIT, NO_MEMORY };

constexpr int64_t BUILT_PER_STATE = 20; // states of all attempts, each of which finds one loop that cannot be counted

Image image_of(Grammar grammar, const Vocabulary &tokens, const Limits &limits) {
    std::unordered_set<int64_t> unrolled; // loops that cannot be counted
    bool many_copies = false;
    std::string reached; // the limit that was exceeded before strings were called
    int64_t built = 0;
    for (Calls calls = Calls::FEW;;) {
        Nfa nfa;
        try {
            nfa = build_nfa(grammar, limits, unrolled, calls);
            built += (int64_t)nfa.states.size();
            if (nfa.states.empty()) continue;
            Automaton automaton = determinise(nfa, limits);
            nfa = {}; // its memory is used again
            return build_image(minimise(std::move(automaton)), tokens, limits);
        } catch (const Uncountable &loop) {
            unrolled.insert(loop.expression);
            if (built / BUILT_PER_STATE > limits.states) // count no loop
                for (const Nfa::Loop &other : nfa.loops) unrolled.insert(other.expression);
        } catch (const ManyCopies &) {
            many_copies = true;
            calls = Calls::BRACKETS;
        } catch (const Unfit &unfit) {
            bool is_limit = dynamic_cast<const LimitReached *>(&unfit), is_first = calls == Calls::FEW;
            if (!dynamic_cast<const Nondeterministic *>(&unfit)) is_first = false;
            else if (!is_first && std::exchange(grammar.has_times, false)) { calls = Calls::FEW; continue; }
            if (calls == Calls::STRINGS) throw LimitReached(reached);
            if (calls == Calls::ANY_SIZE || !(is_limit || is_first || many_copies)) throw;
            if (is_limit) reached = unfit.what();
            calls = is_limit ? Calls::STRINGS : is_first ? Calls::BRACKETS : Calls::ANY_SIZE;
            if (!is_first) unrolled.clear();
        }
    }
}

} // namespace

void *stepgraph_automaton_vocabulary(
    const uint8_t *text, const int32_t *starts, int32_t num_tokens, const int32_t *stops, int32_t num_stops, const int32_t *hidden,
    int32_t num_hidden, int32_t words
) {
    try {
        return new Vocabulary(text, starts, num_tokens, Ints(stops, stops + num_stops), Ints(hidden, hidden + num_hidden), words);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void stepgraph_automaton_free_vocabulary(void *vocabulary) { delete (Vocabulary *)vocabulary; }

void stepgraph_automaton_view_vocabulary(const void *vocabulary, image_vocabulary *view) {
    *view = ((const Vocabulary *)vocabulary)->view();
}

void stepgraph_automaton_free_image(int32_t *image) { free(image); }

int stepgraph_automaton_compile(
    const parsed_grammar *grammar, const int64_t *limits, const void *vocabulary, int32_t **image, char *reason, int64_t reason_size
) {
    try {
        const Vocabulary &tokens = *(const Vocabulary *)vocabulary;
        if (tokens.longest > MAX_TOKEN_BYTES) {
            std::string expected = " bytes, expected at most " + std::to_string(MAX_TOKEN_BYTES) + " for automata";
            throw Unfit("Vocabulary.tokens: got a token of " + std::to_string(tokens.longest) + expected);
        }
        *image = image_of(*grammar, tokens, {limits[0], limits[1], limits[2], limits[3], tokens.longest}).release();
        return DONE;
    } catch (const Unfit &unfit) {
        snprintf(reason, (size_t)reason_size, "%s", unfit.what());
        return UNFIT;
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    } catch (const std::exception &error) { // exceptions must not cross the C interface
        snprintf(reason, (size_t)reason_size, "the automaton compiler failed: %s", error.what());
        return UNFIT;
    }
}
