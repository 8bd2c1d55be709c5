// Mask rows of an automaton over a vocabulary, and the image that holds both.

#pragma once

#include "automaton.h"
#include "vocabulary.h"

#include <memory>

namespace stepgraph {

using Image = std::unique_ptr<int32_t, void (*)(void *)>; // allocated by malloc

Image build_image(const Automaton &automaton, const Vocabulary &vocabulary, const Limits &limits);

} // namespace stepgraph
