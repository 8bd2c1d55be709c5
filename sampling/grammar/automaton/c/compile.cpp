// The C interface of the compiler.

#include "masks.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace stepgraph;

namespace {

enum Outcome { DONE, UNFIT, CANCELLED, NO_MEMORY };

Automaton automaton_of(const Grammar &grammar, const Limits &limits, const Poll &poll) {
    std::unordered_set<int64_t> unrolled; // loops that cannot be counted
    for (bool all_brackets = false;;) {
        poll();
        Nfa nfa = build_nfa(grammar, limits, unrolled, all_brackets);
        if (nfa.states.empty()) continue;
        try {
            return minimise(determinise(nfa, limits, poll));
        } catch (const Uncountable &loop) {
            unrolled.insert(loop.expression);
        } catch (const Nondeterministic &) {
            if (all_brackets) throw;
            all_brackets = true;
        }
    }
}

} // namespace

EXPORTED void *stepgraph_automaton_vocabulary(
    const uint8_t *text, const int32_t *starts, int32_t num_tokens, const int32_t *stops, int32_t num_stops, int32_t words
) {
    return new (std::nothrow) Vocabulary(text, starts, num_tokens, stops, num_stops, words);
}

EXPORTED void stepgraph_automaton_free_vocabulary(void *vocabulary) { delete (Vocabulary *)vocabulary; }

EXPORTED void stepgraph_automaton_view_vocabulary(const void *vocabulary, image_vocabulary *view) { *view = ((const Vocabulary *)vocabulary)->view(); }

// Compiles a parsed grammar. `limits` are the fields of Limits but the last; `*cancel` becomes nonzero when the result is not needed any
// more. On success *image is to be freed with free(). Otherwise `reason` is why.
EXPORTED int stepgraph_automaton_compile(
    const int32_t *data, const int32_t *offsets, int32_t num_expressions, const int32_t *bodies, int32_t num_rules, int32_t root,
    const void *vocabulary, const int64_t *limits, const volatile int32_t *cancel, int32_t **image, char *reason, int64_t reason_size
) {
    const Vocabulary &tokens = *(const Vocabulary *)vocabulary;
    Limits bounds{limits[0], limits[1], limits[2], limits[3], limits[4], tokens.longest};
    Poll poll = [cancel] { if (cancel && *cancel) throw Cancelled(); };
    try {
        Automaton automaton = automaton_of({data, offsets, bodies, num_expressions, num_rules, root}, bounds, poll);
        std::vector<int32_t> built = build_image(automaton, tokens, bounds, poll);
        *image = (int32_t *)malloc(built.size() * sizeof **image);
        if (!*image) return NO_MEMORY;
        memcpy(*image, built.data(), built.size() * sizeof **image);
        return DONE;
    } catch (const Unfit &unfit) {
        snprintf(reason, (size_t)reason_size, "%s", unfit.what());
        return UNFIT;
    } catch (const Cancelled &) {
        return CANCELLED;
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}
