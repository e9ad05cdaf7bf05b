"""Batch synchronisation beside what else two cores could do: DDP, and two loops that never talk."""

import statistics
import sys
from pathlib import Path

from .profile import PROFILE

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers is a script beside this package

import peers

BATCH_SIZE = 32


def images_per_second(name):
    """Of one of the contenders in peers, in a fresh interpreter."""
    contenders = {contender: rest for contender, *rest in peers._lineup()}
    function, arguments, environment = contenders[name]
    return peers._in_a_process(function, [BATCH_SIZE, PROFILE.peer_rows, *arguments], environment)


class BatchOnTwoWorkers:
    timeout = 3600

    def setup_cache(self):
        turns = [self.measure() for _ in range(PROFILE.turns)]
        return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}

    setup_cache.timeout = 3600

    def measure(self):
        ours = images_per_second("daskps batch, shared memory")
        return {
            "ddp": ours / images_per_second("DDP, gloo, tuned"),
            "ceiling": ours / images_per_second("2 loops that never talk, tuned"),
        }

    def track_ratio_to_ddp(self, results):
        return results["ddp"]

    track_ratio_to_ddp.unit = "times the images/s of DDP over gloo"

    def track_ratio_to_ceiling(self, results):
        return results["ceiling"]

    track_ratio_to_ceiling.unit = "times the images/s of two that never talk"
