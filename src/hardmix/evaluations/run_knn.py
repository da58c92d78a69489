"""`hardmix knn RUN`: k-NN accuracy of a run's encoder on its data set's test images."""

from pathlib import Path

from hardmix.console import say
from hardmix.datasets import open_images
from hardmix.errors import InputError
from hardmix.evaluations.knn import knn_accuracy
from hardmix.features import Features, extract, load_trunk
from hardmix.precision import choose_compute
from hardmix.runs import Run


def evaluate(path: Path, *, k: int, temperature: float) -> None:
    """All training images vote for all test images; the result is RUN/results/knn.json."""
    run = Run.open(path)
    config, trunk = run.config(), load_trunk(run)
    compute = choose_compute(config.train.device, config.train.precision)
    trunk.to(compute.device)

    def features(split: str) -> Features:
        images = open_images(config.data, "test" if split == "test" else "train")
        if images.labels is None:
            raise InputError(f"{images.name} has no labels: k-NN accuracy compares classes.")
        size, workers = config.data.image_size, config.data.workers
        return extract(trunk, images, image_size=size, compute=compute, workers=workers)

    train, test = features("train"), features("test")
    accuracy = knn_accuracy(
        train.features, train.labels, test.features, test.labels, k=k, temperature=temperature
    )
    settings = {"k": k, "temperature": temperature, "train": len(train.ids), "test": len(test.ids)}
    file = run.write_result("knn", {**accuracy._asdict(), **settings})
    say(f"k-NN accuracy {accuracy.top1:.4f} (top 5: {accuracy.top5:.4f}). Wrote {file}")
