"""A small run of every method: two epochs of three steps."""

import dataclasses

from hardmix.settings.methods import METHOD_FACTS
from ranks import tiny

OPTIONS = {
    "swav": {"prototypes": 12, "queue_size": 32, "queue_epoch": 0, "frozen_epochs": 1},
    "pcl": {"clusters": (4, 8), "warm_up_epochs": 1},
    "byol": {"hidden": 64},
    "moco-v3": {"hidden": 64},
}
SAME_CLUSTER = "mochi, loss.filter=same-cluster"
EVERY = (*METHOD_FACTS, SAME_CLUSTER)
"""Methods that differ in what a checkpoint holds, or in when it is saved."""


def small(name, mixed=False, **more):
    """Two epochs of three steps, with points in the second one if there are any."""
    points = {"num_hardest": 16, "warm_up_epochs": 1}
    points |= (
        {"num_pairs": 8, "num_with_query": 4}
        if mixed
        else dict.fromkeys(("num_pairs", "num_with_query"), 0)
    )
    if name == "moco-v3":
        points["num_hardest"] = 8  # there are 15 other images in a batch
    if name == "cmc":
        points["strategy"] = "mixed-with-key"
    if name == SAME_CLUSTER:
        name, more = "mochi", {"loss": {"filter": "same-cluster", "clusters": 5}, **more}
    train = {"knn_every": 0, "log_every": 2, "precision": "fp32"} | more.pop("train", {})
    data = {"num_images": 48, "workers": 0} | more.pop("data", {})
    config = tiny(name, mix=points, train=train, data=data, **more)
    own = OPTIONS.get(name)
    return (
        config
        if own is None
        else dataclasses.replace(config, options=dataclasses.replace(config.options, **own))
    )
