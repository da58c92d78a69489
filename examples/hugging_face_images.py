"""An image set of Hugging Face's `datasets`: pre-train on it, and give it a column of features.

python examples/hugging_face_images.py --out RUN [--name uoft-cs/cifar10 --column img]

The images are written to a folder, as files of any other origin would lie there. All commands
(`hardmix knn RUN`, `hardmix report RUN`, ...) then work on the run. Without a name, a small set is
drawn in memory.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tyro
from datasets import Dataset, load_dataset
from PIL import Image

from hardmix import draw_shapes, load_encoder, pretrain, recipes


def small_set(num_images: int = 96) -> Dataset:
    """Return a set with Pillow images and labels, as `load_dataset` does."""
    images, labels = draw_shapes(num_images)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    return Dataset.from_dict({"image": pictures, "label": labels.tolist()})


def main(
    out: Path,
    name: str | None = None,
    split: str = "train",
    column: str = "image",
    epochs: int = 2,
    queue_size: int = 64,
) -> Dataset:
    """Pre-train; return the set with a column `features`. A real set wants a queue of thousands."""
    images: Any = small_set() if name is None else load_dataset(name, split=split)
    folder = out.with_name(f"{out.name}-images")
    for index, row in enumerate(images):  # a folder for each class, if known: only k-NN looks
        file = folder / str(row.get("label", "images")) / f"{index:07d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        row[column].save(file)

    config = recipes.demo()
    config = replace(
        config,
        data=replace(config.data, name="folder", root=str(folder), workers=0),
        mix=replace(config.mix, num_hardest=32, num_pairs=32, warm_up_epochs=1),
        train=replace(config.train, epochs=epochs, batch_size=32, queue_size=queue_size),
    )
    pretrain(config, out)

    encoder = load_encoder(out)

    @torch.no_grad()
    def features(batch: dict[str, list[Image.Image]]) -> dict[str, list[list[float]]]:
        crops = torch.stack([encoder.preprocess(image) for image in batch[column]])
        return {"features": encoder(crops).tolist()}

    images = images.map(features, batched=True, batch_size=64)
    print(f"{len(images)} images, each with {len(images[0]['features'])} features")
    return images


if __name__ == "__main__":
    tyro.cli(main)
