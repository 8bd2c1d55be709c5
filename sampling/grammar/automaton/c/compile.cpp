// The C interface of the compiler.

#include "masks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string_view>

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace stepgraph;

namespace {

enum Outcome { DONE, UNFIT, NO_MEMORY };

Image image_of(Grammar grammar, const Vocabulary &tokens, const Limits &limits) {
    std::unordered_set<int64_t> unrolled; // loops that cannot be counted
    bool many_copies = false;
    std::string reached; // the limit that was exceeded before strings were called
    for (Calls calls = Calls::FEW;;) {
        try {
            Nfa nfa = build_nfa(grammar, limits, unrolled, calls);
            if (!nfa.states.empty()) return build_image(minimise(determinise(nfa, limits)), tokens, limits);
        } catch (const Uncountable &loop) {
            unrolled.insert(loop.expression);
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

EXPORTED void *stepgraph_automaton_vocabulary(
    const uint8_t *text, const int32_t *starts, int32_t num_tokens, const int32_t *stops, int32_t num_stops, const int32_t *hidden,
    int32_t num_hidden, int32_t words
) {
    try {
        return new Vocabulary(text, starts, num_tokens, Ints(stops, stops + num_stops), Ints(hidden, hidden + num_hidden), words);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

EXPORTED void stepgraph_automaton_free_vocabulary(void *vocabulary) { delete (Vocabulary *)vocabulary; }

EXPORTED void stepgraph_automaton_view_vocabulary(const void *vocabulary, image_vocabulary *view) { *view = ((const Vocabulary *)vocabulary)->view(); }

EXPORTED void stepgraph_automaton_free_image(int32_t *image) { free(image); }

// A parsed grammar of xgrammar, and the limits of its automaton.
struct grammar_source {
    const int32_t *data, *offsets, *bodies, *formats;
    int32_t num_expressions, num_rules, root;
    const int64_t *limits; // the fields of Limits except the last
    Grammar grammar() const { return {data, offsets, bodies, formats, num_expressions, num_rules, root}; }
    Limits bounds(int64_t longest) const { return {limits[0], limits[1], limits[2], limits[3], longest}; }
};

// Sets *image to the compiled grammar, or writes to `reason` why there is none.
EXPORTED int stepgraph_automaton_compile(const grammar_source *source, const void *vocabulary, int32_t **image, char *reason, int64_t reason_size) {
    try {
        const Vocabulary &tokens = *(const Vocabulary *)vocabulary;
        *image = image_of(source->grammar(), tokens, source->bounds(tokens.longest)).release();
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

// See image.h.
int32_t *stepgraph_automaton_crossing(const int32_t *image, const image_vocabulary *vocabulary) try {
    if (!image[IMAGE_CROSSING]) return nullptr;
    auto text_of = [&](int32_t token) {
        const int32_t *start = vocabulary->starts + token;
        return std::string_view((const char *)vocabulary->text + start[0], (size_t)(start[1] - start[0]));
    };
    Ints lists((size_t)image[IMAGE_STATES]);
    std::map<Ints, int32_t> known; // many states share a list
    for (int32_t state = 0; state < image[IMAGE_STATES]; state++) {
        const int32_t *range = image + image[IMAGE_CROSS_START] + state, *cross = image + image[IMAGE_CROSS];
        auto [place, is_new] = known.try_emplace(Ints(cross + range[0], cross + range[1]), (int32_t)lists.size());
        lists[(size_t)state] = place->second;
        if (!is_new) continue;
        std::string_view before;
        for (int32_t token : place->first) {
            std::string_view text = text_of(token);
            auto shared = std::mismatch(text.begin(), text.end(), before.begin(), before.end()).first - text.begin();
            lists.insert(lists.end(), {token, (int32_t)text.size(), (int32_t)shared});
            lists.resize(lists.size() + (text.size() + 3) / 4);
            memcpy(lists.data() + lists.size() - (text.size() + 3) / 4, text.data(), text.size());
            before = text;
        }
        lists.push_back(-1);
    }
    auto found = (int32_t *)malloc(lists.size() * sizeof(int32_t));
    return found ? std::copy(lists.begin(), lists.end(), found) - lists.size() : nullptr;
} catch (const std::bad_alloc &) {
    return nullptr;
}
