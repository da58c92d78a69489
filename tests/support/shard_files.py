"""Small shards of webdataset: tar archives of images."""

import io
import tarfile

from PIL import Image


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_shard(path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
