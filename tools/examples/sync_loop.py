"""A serving loop in one thread: submit, step, deliver events. `python tools/examples/sync_loop.py`

Requests come from another thread, as they would from a socket; the loop sleeps while there is nothing to do.
"""

from __future__ import annotations

import threading

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget

DATE = Constraint.regex(r"20[0-9]{2}-[01][0-9]-[0-3][0-9]")
REQUESTS = [([1, 2, 3], DATE, 0.0), ([4, 5], None, 0.8), ([6], Constraint.choice(["yes", "no", "perhaps"]), 0.8)]


def main() -> dict[int, Job]:
    vocabulary = Vocabulary.printable()
    target = ToyTarget(vocabulary.logits_width)  # Engine.from_pretrained("path/to/model") for a real one
    config = EngineConfig(max_rows=2, num_speculative_tokens=3, max_length=128, eager=True)  # eager: no graphs to record
    jobs: dict[int, Job] = {}
    with Engine(target, ToyDraft(target, agreement=0.8), vocabulary=vocabulary, config=config) as engine:
        engine.capture()

        def admit() -> None:  # from any thread, at any time
            for prompt, constraint, temperature in REQUESTS:
                sampling = SamplingParams(temperature=temperature, seed=7)
                job = engine.submit(prompt, constraint=constraint, sampling=sampling, max_new_tokens=24)
                jobs[job.id] = job

        admitting = threading.Thread(target=admit)
        admitting.start()
        ended = 0
        while ended < len(REQUESTS):
            engine.wait()
            for event in engine.step():
                print(f"job {event.job_id}: {vocabulary.decode(event.tokens)!r} {event.finish_reason or ''}")
                ended += event.finish_reason is not None
        admitting.join()
    return jobs


if __name__ == "__main__":
    main()
