"""The commands that use an encoder or bring one in: features, neighbours, export, import."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from hardmix.commands import argv
from hardmix.commands.options import Help, RunFolder, data_field, data_of, make_options, parse


def features(arguments: list[str]) -> None:
    """Features of any folder of images, to a file."""
    own = argv.data_of_run(arguments)
    about = "Features of any images: hardmix features RUN --data.root DIR --out FILE."
    out = Help(help=".safetensors, .npy or .csv; names are written beside it")
    fields = [("run", RunFolder), ("out", Annotated[Path, out]), data_field(own, arguments)]
    options = parse(make_options("Features", about, fields), "features", arguments)
    from hardmix.evaluation.feature_files import write_features

    write_features(options.run, data_of(options.data, own), options.out)


def neighbours(arguments: list[str]) -> None:
    """The images nearest to one, as a picture."""
    own = argv.data_of_run(arguments)
    about = "The images most similar to one: hardmix neighbours RUN IMAGE [--data.root DIR]."
    image = Annotated[tyro.conf.Positional[Path], Help(metavar="IMAGE", help="an image file")]
    fields = [
        ("run", RunFolder),
        ("image", image),
        (
            "out",
            Annotated[Path, Help(help="the contact sheet")],
            field(default=Path("neighbours.png")),
        ),
        ("number", Annotated[int, Help(help="images to show")], field(default=11)),
        data_field(own, arguments),
    ]
    options = parse(make_options("Neighbours", about, fields), "neighbours", arguments)
    from hardmix.explore.contact_sheet import show_neighbours

    data = data_of(options.data, own)
    show_neighbours(options.run, options.image, data, options.out, options.number)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's encoder for another program: hardmix export RUN --format onnx --out FILE."""

    run: RunFolder
    format: Annotated[str, Help(help="safetensors, torchvision, timm, onnx or detectron2")]
    out: Annotated[Path, Help(help="the file to write; detectron2's configs stand beside it")]
    with_preprocessing: Annotated[
        bool, Help(help="onnx: take uint8 images of any size, and prepare them in the graph")
    ] = False


def export(arguments: list[str]) -> None:
    """Write a run's encoder for another program."""
    options = parse(Export, "export", arguments)
    from hardmix.weights.export import export as write

    write(
        options.run,
        options.format,
        options.out,
        with_preprocessing=options.with_preprocessing,
    )


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a run of weights from elsewhere: MoCo, torchvision, timm, lightly. Runs no code."""

    file: Annotated[tyro.conf.Positional[Path], Help(metavar="FILE", help="the weights")]
    out: Annotated[Path, Help(help="the run's folder, to be made")]
    backbone: Annotated[str | None, Help(help="where it is not recognised, e.g. timm:NAME")] = None
    image_size: Annotated[int | None, Help(help="pixels; unset: the file's own, 32 or 224")] = None


def import_(arguments: list[str]) -> None:
    """Make a run of weights from elsewhere."""
    options = parse(Import, "import", arguments)
    from hardmix.weights.foreign import import_weights

    import_weights(
        options.file, options.out, backbone=options.backbone, image_size=options.image_size
    )
