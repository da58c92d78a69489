"""Some images of a set, for people to look at."""

from hardmix.data.image_files import UnreadableImage
from hardmix.data.image_set import ImageSet
from hardmix.errors import InputError
from hardmix.runtime.random_numbers import permutation, seed_of


def sample_ids(images: ImageSet, seed: int, number: int = 8) -> list[int]:
    """Return readable images chosen by the seed; one of each class before a second of any."""
    order: list[int] = permutation(seed_of("gallery", seed), 0, len(images)).tolist()
    if images.labels is not None:
        labels, seen = images.labels.tolist(), dict[int, int]()
        rounds = {}
        for index in order:
            rounds[index] = seen.get(labels[index], 0)
            seen[labels[index]] = rounds[index] + 1
        order.sort(key=rounds.__getitem__)  # stable: within a round the order stays
    chosen: list[int] = []
    for index in order[: 10 * number]:
        try:
            images.image(index)
        except UnreadableImage:
            continue
        chosen.append(index)
        if len(chosen) == number:
            break
    if not chosen:
        raise InputError("none of its sample images can be read.")
    return chosen


def class_of(images: ImageSet, index: int) -> str | None:
    """Return the name of an image's class; None if it is unknown."""
    if images.labels is None or not images.classes or images.labels[index] < 0:
        return None
    return images.classes[int(images.labels[index])]


def file_of(images: ImageSet, index: int) -> str:
    """Return an image's file; empty if it is not in a file of its own."""
    return "" if images.files is None else images.files[index]
