/* See checked.h. */

#include "checked.h"

#include "matcher.h"

#include <string.h>

static void compare(matcher_row *row, const int32_t *mask, int64_t token, int accepted) {
    const checked_masks *checked = &row->checked;
    int in_range = token >= 0 && token < checked->words * 32;
    int allowed = in_range && (uint32_t)mask[token / 32] >> (token % 32) & 1;
    if (allowed == accepted) return;
    fail(row, "check_masks: the mask of %s %s token %lld behind %lld tokens, accept_token %s it", checked->backend,
         allowed ? "allows" : "forbids", (long long)token, (long long)checked->accepted, allowed ? "refuses" : "takes");
}

void hold_against_mask(matcher_row *row, int64_t token, int accepted) {
    checked_masks *checked = &row->checked;
    if (!checked->backend || accepted < 0) return;
    int64_t kept = checked->accepted % checked->room;
    if (checked->places[kept] == checked->accepted) compare(row, checked->masks + kept * checked->words, token, accepted);
    checked->accepted += accepted;
}

void keep_mask(checked_masks *checked, const int32_t *mask) {
    if (!checked->backend) return;
    int64_t kept = checked->accepted % checked->room;
    checked->places[kept] = checked->accepted;
    memcpy(checked->masks + kept * checked->words, mask, (size_t)checked->words * sizeof *mask);
}
