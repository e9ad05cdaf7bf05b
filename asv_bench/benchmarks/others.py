"""Batch synchronisation beside what else two cores could do: DDP, and two loops that never talk."""

import statistics

from .contenders import LINEUP, in_fresh_interpreter
from .profile import PROFILE

COMPARED = ("daskps batch, shared memory", "DDP, gloo, tuned", "2 loops that never talk, tuned")


class BatchOnTwoWorkers:
    timeout = 3600

    def setup_cache(self):
        turns = [self.measure() for _ in range(PROFILE.turns)]
        return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}

    setup_cache.timeout = 3600

    def measure(self):
        ours, ddp, ceiling = (self.images_per_second(name) for name in COMPARED)
        return {"ddp": ours / ddp, "ceiling": ours / ceiling}

    def images_per_second(self, name):
        return in_fresh_interpreter(LINEUP[name], 32, PROFILE.peer_rows, scored=False).images_per_second

    def track_ratio_to_ddp(self, results):
        return results["ddp"]

    track_ratio_to_ddp.unit = "times the images/s of DDP over gloo"

    def track_ratio_to_ceiling(self, results):
        return results["ceiling"]

    track_ratio_to_ceiling.unit = "times the images/s of two that never talk"
