"""The commands that use, export or import an encoder: features, neighbours, export, import."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from hardmix.commands.argv import CommandLine, data_of_run
from hardmix.commands.options import (
    Checkpoint,
    Help,
    RunFolder,
    data_field,
    data_of,
    make_options,
    parse,
)


def features(line: CommandLine) -> None:
    """Write the features of a folder of images to a file."""
    own = data_of_run(line)
    about = "Write the features of images: hardmix features RUN --data.root DIR --out FILE."
    out = Help(
        help="File to write: .csv, or .safetensors or .npy with the images' names in a .names.txt."
    )
    fields = [
        ("run", RunFolder),
        ("out", Annotated[Path, out]),
        ("checkpoint", Checkpoint, field(default=None)),
        data_field(own, line),
    ]
    options = parse(make_options("Features", about, fields), "features", line)
    from hardmix.evaluation.features import write_features

    write_features(options.run, data_of(options.data, own), options.out, options.checkpoint)


def neighbours(line: CommandLine) -> None:
    """Find the images most similar to a given one."""
    own = data_of_run(line)
    about = "Find the most similar images: hardmix neighbours RUN IMAGE [--data.root DIR]."
    image = Annotated[tyro.conf.Positional[Path], Help(metavar="IMAGE", help="The query image.")]
    fields = [
        ("run", RunFolder),
        ("image", image),
        (
            "out",
            Annotated[Path, Help(help="Contact sheet to write, as PNG.")],
            field(default=Path("neighbours.png")),
        ),
        ("number", Annotated[int, Help(help="Number of images to show.")], field(default=11)),
        data_field(own, line),
    ]
    options = parse(make_options("Neighbours", about, fields), "neighbours", line)
    from hardmix.explore.neighbour_sheets import show_neighbours

    data = data_of(options.data, own)
    show_neighbours(options.run, options.image, data, options.out, options.number)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export a run's encoder to another program: hardmix export RUN --format onnx --out FILE."""

    run: RunFolder
    format: Annotated[str, Help(help="safetensors, torchvision, timm, onnx, detectron2 or hf.")]
    out: Annotated[
        Path,
        Help(help="File to write, with detectron2's configs beside it; hf: a folder to upload."),
    ]
    checkpoint: Checkpoint = None
    licence: Annotated[
        str | None, Help(help="hf only: the weights' licence for the model card, e.g. cc-by-4.0.")
    ] = None
    with_preprocessing: Annotated[
        bool,
        Help(help="onnx only: take uint8 images of any size and preprocess them in the graph."),
    ] = False


def export(line: CommandLine) -> None:
    """Export a run's encoder to another program's format."""
    options = parse(Export, "export", line)
    from hardmix.weights.export import export as write

    write(
        options.run,
        options.format,
        options.out,
        with_preprocessing=options.with_preprocessing,
        checkpoint=options.checkpoint,
        licence=options.licence,
    )


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import weights from MoCo, torchvision, timm or lightly as a run.

    No code in the file is executed.
    """

    file: Annotated[tyro.conf.Positional[Path], Help(metavar="FILE", help="File of weights.")]
    out: Annotated[Path, Help(help="Folder of the new run.")]
    backbone: Annotated[
        str | None, Help(help="Backbone such as timm:NAME, if it is not recognised.")
    ] = None
    image_size: Annotated[
        int | None, Help(help="Image size in pixels. Unset: as in the file, otherwise 32 or 224.")
    ] = None


def import_(line: CommandLine) -> None:
    """Import weights from other programs as a run."""
    options = parse(Import, "import", line)
    from hardmix.weights.foreign import import_weights

    import_weights(
        options.file, options.out, backbone=options.backbone, image_size=options.image_size
    )
