// See levels.h.

#include "levels.h"

#include <iterator>
#include <numeric>

namespace stepgraph {

constexpr int32_t MAX_COARSER_BYTES = 16; // states are compared for texts of up to this many bytes
constexpr int64_t MAX_COARSER_MOVES = 50'000'000; // moves that are compared to find equivalent states

static Level level_with(Ints classes) {
    Level level;
    level.class_of = std::move(classes);
    for (int32_t state = (int32_t)level.class_of.size(); state-- > 0;) {
        size_t class_id = (size_t)level.class_of[(size_t)state];
        if (level.first.size() <= class_id) level.first.resize(class_id + 1);
        level.first[class_id] = state;
    }
    return level;
}

Levels::Levels(const Automaton &automaton)
    : automaton(automaton), rows(automaton.classes),
      quote(automaton.bytes_by_class()[automaton.class_of['"']].size() == 1 ? automaton.class_of['"'] : -1) {
    leave_out_quotes();
    Level every; // each state is its own class
    every.class_of.resize((size_t)automaton.states);
    std::iota(every.class_of.begin(), every.class_of.end(), 0);
    every.first = every.class_of;
    if (quote >= 0) {
        for (Ints &classes : equivalent_states(unquoted, [this](const Ints &first) { return kinds_after_quotes(first); }))
            levels.push_back(level_with(std::move(classes)));
    }
    levels.push_back(std::move(every));
}

void Levels::leave_out_quotes() {
    unquoted.states = automaton.states;
    unquoted.classes = automaton.classes;
    unquoted.accepts.assign((size_t)automaton.states, 0);
    unquoted.pop = automaton.pop;
    unquoted.spans.reserve(automaton.spans.size());
    Interned moves;
    for (int32_t state = 0; state < automaton.states; state++) {
        for (const Span &span : automaton.spans_of(state)) {
            int32_t entry = automaton.target_of(span.entry);
            if (entry < 0) continue;
            if (automaton.push_of(span.entry) >= 0) {
                Move move;
                move.target = entry, move.counter = automaton.push_of(span.entry);
                auto [number, is_new] = moves.add(move.ints(), Move::INTS);
                if (is_new) unquoted.moves.push_back(move);
                entry = SPECIAL + number;
            }
            if (span.low < quote) unquoted.add_span({span.low, std::min(span.end, quote), entry});
            if (span.end > quote + 1) unquoted.add_span({std::max(span.low, quote + 1), span.end, entry});
        }
        unquoted.end_state();
    }
}

// [states] The class of the first level, that of the state after a quote, in which a text of the second level continues, and what the
// quote pushes, as one number.
Ints Levels::kinds_after_quotes(const Ints &classes) const {
    Interned kinds;
    Ints found;
    for (int32_t state = 0; state < automaton.states; state++) {
        int32_t quoted = automaton.entry_of(state, quote), to = automaton.target_of(quoted);
        const int32_t kind[] = {classes[(size_t)state], to < 0 ? DEAD : classes[(size_t)to], to < 0 ? DEAD : automaton.push_of(quoted)};
        found.push_back(kinds.add(kind, std::size(kind)).number);
    }
    return found;
}

// Ends when no group changes, or at a limit of work. Each round divides the groups of several classes.
void Levels::find_coarser() {
    Level &level = levels[0];
    int32_t size = (int32_t)level.first.size();
    std::vector<Ints> open, still; // groups of several classes
    level.coarser.assign(1, Ints((size_t)size));
    Interned kinds;
    for (int32_t class_id = 0; class_id < size; class_id++) {
        level.coarser[0][(size_t)class_id] = kinds.add(&automaton.pop[level.first[(size_t)class_id]], 1).number;
        open.resize((size_t)kinds.size());
        open[(size_t)level.coarser[0][(size_t)class_id]].push_back(class_id);
    }
    int32_t count = kinds.size();
    open.erase(std::remove_if(open.begin(), open.end(), [](const Ints &states) { return states.size() < 2; }), open.end());
    std::vector<std::pair<uint64_t, int32_t>> sorted; // the members of one group, by hash
    for (int64_t work = 0; level.coarser.size() <= MAX_COARSER_BYTES && !level.is_final && work <= MAX_COARSER_MOVES;) {
        const Ints &last = level.coarser.back();
        auto class_after = [&](int32_t entry) {
            int64_t pushed = entry < SPECIAL ? 0 : unquoted.moves[(size_t)(entry - SPECIAL)].counter + 1;
            return last[(size_t)level.class_of[(size_t)unquoted.target_of(entry)]] | pushed << 32;
        };
        Ints found = last;
        level.is_final = true;
        still.clear();
        auto is_same = [&](int32_t entry, int32_t other) { return class_after(entry) == class_after(other); };
        auto spans_of = [&](int32_t class_id) { return unquoted.spans_of(level.first[(size_t)class_id]); };
        for (const Ints &members : open) {
            sorted.clear();
            for (int32_t class_id : members) {
                work += spans_of(class_id).end() - spans_of(class_id).begin();
                sorted.push_back({rows.hash(spans_of(class_id), class_after), class_id});
            }
            std::sort(sorted.begin(), sorted.end());
            for (size_t begin = 0, end; begin < sorted.size(); begin = end) { // the first part keeps the number
                int32_t number = begin ? count++ : last[(size_t)members[0]];
                auto is_like_first = [&](size_t at) {
                    auto [hash, class_id] = sorted[at];
                    return hash == sorted[begin].first && rows.is_equal(spans_of(class_id), spans_of(sorted[begin].second), is_same);
                };
                for (end = begin + 1; end < sorted.size() && is_like_first(end);) end++;
                level.is_final &= end - begin == sorted.size();
                const bool is_open = end - begin > 1;
                if (is_open) still.emplace_back();
                for (size_t at = begin; at < end; at++) {
                    found[(size_t)sorted[at].second] = number;
                    if (is_open) still.back().push_back(sorted[at].second);
                }
            }
        }
        open.swap(still);
        level.coarser.push_back(std::move(found));
    }
    level.coarser_classes = count;
}

} // namespace stepgraph
