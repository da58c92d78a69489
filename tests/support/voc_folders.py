"""Small folders in the layout of PASCAL VOC."""

from pathlib import Path

from PIL import Image


def thing(name, *corners, difficult=0):
    keys = ("xmin", "ymin", "xmax", "ymax")
    box = "".join(f"<{key}>{value}</{key}>" for key, value in zip(keys, corners, strict=True))
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    return (
        f"<object>{part}<name>{name}</name><difficult>{difficult}</difficult>"
        f"<bndbox>{box}</bndbox></object>"
    )


def voc_image(root: Path, name: str, *objects: str, size=(40, 30), suffix=".jpg") -> None:
    for folder in ("Annotations", "JPEGImages"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    width, height = size
    (root / "Annotations" / f"{name}.xml").write_text(
        f"<annotation><size><width>{width}</width><height>{height}</height></size>"
        f"{''.join(objects)}</annotation>"
    )
    Image.new("RGB", size).save(root / "JPEGImages" / f"{name}{suffix}")


def voc_lists(root: Path, **lists: list[str]) -> Path:
    (root / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
    for name, names in lists.items():
        (root / "ImageSets" / "Main" / f"{name}.txt").write_text("\n".join(names) + "\n")
    return root
